"""The algorithm on one page: noisy rollouts from the 4-bit policy, rewards, advantages, a corrected update."""

import logging
import time
from pathlib import Path

import torch

from qerl_core import distributed
from qerl_core.algo.noise import next_sigma, sigma_at
from qerl_core.batch import sample_batch, timed
from qerl_core.calibration import calibration_text
from qerl_core.config import TrainConfig
from qerl_core.data.chat import render_prompts
from qerl_core.data.prompts import PromptStream
from qerl_core.data.rows import read_rows
from qerl_core.errors import NoLearningSignal
from qerl_core.evaluation import evaluate, held_out_prompts
from qerl_core.graders.pools import open_pool
from qerl_core.observer import Metrics, NullObserver, Observer
from qerl_core.policy.memory import gpu_bytes, read_config, require_memory, sizes_of
from qerl_core.policy.model import default_device
from qerl_core.policy.resume import Position
from qerl_core.policy.source import local_folder
from qerl_core.policy.update import Policy
from qerl_core.rollout.choice import chosen, open_engine
from qerl_core.scoring import Scorer
from qerl_core.sharding import ShardedEngine

logger = logging.getLogger(__name__)


def train(config: TrainConfig, folder: Path, observer: Observer, *, cache: Path) -> bool:
    """Run a job in `folder`, or go on from its last whole checkpoint. False: the observer stopped it early.

    Converted and quantized base models are kept in `cache`. A QerlError says why a run cannot go on. Under `torchrun`
    all processes take each step together, and the first speaks for all (`distributed.py`).
    """
    speaks = distributed.rank() == 0
    observer = observer if speaks else NullObserver()
    folder.mkdir(parents=True, exist_ok=True)
    observer.on_phase("preparing")
    total_bytes = gpu_bytes(default_device())
    if total_bytes is not None:
        sizes = sizes_of(read_config(local_folder(config.model, cache)))
        engine_name, _ = chosen(config, default_device(), sizes)
        require_memory(config, sizes, total_bytes=total_bytes, engine=engine_name)
    text = calibration_text(config, cache)
    if text is not None:
        observer.on_phase("quantizing")
        observer.on_note(f"The base is rounded to NVFP4 by gptq, for {len(text)} texts like this run's own.")
    policy = Policy.open(config, cache, calibration=text)
    policy.on_note = observer.on_note
    engine = ShardedEngine(open_engine(config, policy.model, observer))
    rows = render_prompts(
        read_rows(config.data.train_path), policy.model.tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens
    )
    held_out = held_out_prompts(config, policy.model.tokenizer)
    checkpoint = policy.resume(folder)
    prompts = PromptStream(rows, shuffle=config.data.shuffle, seed=config.seed, position=policy.position.prompts_taken)
    observer.on_start(policy.position.step if checkpoint else -1)
    if checkpoint:  # the run may have died before anyone heard of it
        observer.on_checkpoint(policy.position.step, checkpoint)

    with open_pool(config.grader) as pool:
        scorer = Scorer(pool)
        if held_out and not checkpoint:
            observer.on_phase("evaluating")
            if distributed.agreed(observer.on_step(0, evaluate(engine, scorer, held_out, config))):
                return False
        observer.on_phase("training")
        while policy.position.step < config.num_steps:
            started, step = time.monotonic(), policy.position.step
            times: Metrics = {}
            seed = step_seed(config.seed, step)
            torch.manual_seed(seed)
            sigma = sigma_at(step, config.num_steps, config.noise, controlled=policy.position.sigma)
            batch = sample_batch(engine, scorer, prompts, config, sigma=sigma, seed=seed)
            with timed(times, "time/update_s"):
                learned = policy.update(batch.groups, batch.advantages_PG)
            metrics = learned | batch.metrics | times | {"noise/sigma": sigma}
            policy.position = advance(policy.position, prompts.position, metrics, config)
            if held_out and evaluation_is_due(policy.position.step, config):
                observer.on_phase("evaluating")
                metrics |= evaluate(engine, scorer, held_out, config)
                observer.on_phase("training")
            metrics["time/step_s"] = time.monotonic() - started
            stop = distributed.agreed(observer.on_step(policy.position.step, metrics))
            if speaks and (stop or checkpoint_is_due(policy.position.step, config)):
                observer.on_checkpoint(policy.position.step, policy.save(folder))
            if stop:
                return policy.position.step == config.num_steps
    return True


def step_seed(seed: int, step: int) -> int:
    """A seed for the draws of a step: different for every (seed, step) of a run's range."""
    return seed * 1_000_003 + step


def evaluation_is_due(step: int, config: TrainConfig) -> bool:
    """After the last step, and each `evaluation.every` before it."""
    every = config.evaluation.every
    return step == config.num_steps or (every is not None and step % every == 0)


def checkpoint_is_due(step: int, config: TrainConfig) -> bool:
    """After the last step, and each `checkpoint_every` before it."""
    return step == config.num_steps or step % config.checkpoint_every == 0


def advance(position: Position, prompts_taken: int, metrics: Metrics, config: TrainConfig) -> Position:
    """The position after a step. NoLearningSignal if the run has only had steps without signal, and too many."""
    learned = metrics["tokens/trained"] > 0
    idle = 0 if learned else position.idle_steps + 1
    if position.updates == 0 and config.max_idle_steps is not None and idle >= config.max_idle_steps:
        raise NoLearningSignal(
            f"in the first {idle} steps every completion of each prompt got the same reward, so there is nothing to "
            "learn from; use easier or harder rows, a finer grader, a larger group_size, or raise max_idle_steps"
        )
    sigma = next_sigma(metrics["noise/sigma"], metrics, config.noise)
    return Position(position.step + 1, prompts_taken, position.updates + (1 if learned else 0), idle, sigma)
