"""The text that calibrated rounding looks at: a job's own prompts, and what the unquantized base answers to them.

It is kept beside the quantized models, so that whoever opens the base again, a job that goes on or an evaluation,
has the same text and with it the same rounded weights, though no two machines sample alike.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer

from qerl_core.config import TrainConfig
from qerl_core.data.chat import render_prompts
from qerl_core.data.rows import read_rows
from qerl_core.errors import NotEnoughMemory
from qerl_core.folders import lone_maker, published
from qerl_core.policy.memory import gpu_bytes
from qerl_core.policy.model import default_device, open_model, rounding_method
from qerl_core.policy.source import local_folder
from qerl_core.quant.calibration import Text
from qerl_core.quant.checkpoint import is_quantized
from qerl_core.rollout.engine import Sampling
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.types import Prompt

logger = logging.getLogger(__name__)

NUM_SEQUENCES = 128
"""At most so many; of few rows, several completions each."""
NUM_TOKENS = 32_768
"""In all sequences together, at most."""
COMPLETION_TOKENS = 256
"""A completion is cut after so many, or the job's own limit."""
SEED = 2_000_003
"""Of the choice of rows and of the sampling: one text for all jobs on the same base and rows."""
ROOM = 0.9
"""Of a GPU, for the unquantized base; the rest is for a few sequences of it."""
_TEXT = "text.json"


def calibration_text(config: TrainConfig, cache: Path) -> Text | None:
    """The token ids that the job's base is calibrated on, sampled once and kept in `cache`.

    None for a base that is not rounded, or by a method that looks at no text. Raises BadCheckpoint, BadData and
    RolloutFailed.
    """
    if config.model.quantization != "nvfp4" or rounding_method(config.model) != "gptq":
        return None
    folder = local_folder(config.model, cache)
    if is_quantized(folder):
        return None
    _require_room(folder, gpu_bytes(default_device()))
    rows = read_rows(config.data.train_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = render_prompts(rows, tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens)
    max_tokens = min(config.rollout.max_completion_tokens, COMPLETION_TOKENS)
    chosen, num_completions = choose(prompts, max_tokens)
    sampling = Sampling(
        num_completions=num_completions,
        max_tokens=max_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
    )
    out = cache / f"calibration-{_hash(config, chosen, sampling)}"
    with lone_maker(out) as is_wanted:
        if is_wanted:
            text = _sampled(config, chosen, sampling, cache)
            with published(out) as filling:
                (filling / _TEXT).write_text(json.dumps(text))
    kept: list[list[int]] = json.loads((out / _TEXT).read_text())
    return kept


def _require_room(folder: Path, total_bytes: int | None) -> None:
    """NotEnoughMemory if a GPU cannot hold the unquantized base, from which the text is sampled."""
    if total_bytes is None:
        return
    base = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if base > ROOM * total_bytes:
        raise NotEnoughMemory(
            f"calibrated rounding samples from the unquantized base, {base / 2**30:.1f} GiB, and the GPU has "
            f"{total_bytes / 2**30:.1f} GiB; set quantization.method to rtn, or give an NVFP4 folder that "
            "`qerl quantize` made on a larger machine"
        )


def choose(prompts: Sequence[Prompt], max_tokens: int) -> tuple[list[Prompt], int]:
    """Prompts, seeded, and the completions of each: as many as fit if all are of mean length and none ends early."""
    length = sum(len(prompt.token_ids) for prompt in prompts) // len(prompts) + max_tokens
    num_sequences = max(1, min(NUM_SEQUENCES, NUM_TOKENS // length))
    chosen = Random(SEED).sample(prompts, min(len(prompts), num_sequences))
    return chosen, num_sequences // len(chosen)


def _sampled(config: TrainConfig, prompts: Sequence[Prompt], sampling: Sampling, cache: Path) -> list[list[int]]:
    logger.info("sampling calibration text for %d prompts, once", len(prompts))
    unquantized = config.model.model_copy(update={"quantization": "none"})
    policy = open_model(config.model_copy(update={"model": unquantized}), cache)
    groups = HfEngine(policy, max_sequences=32).rollout(prompts, sampling, sigma=0.0, seed=SEED)
    del policy
    gc.collect()  # before the base is opened once more: a GPU holds no two
    torch.cuda.empty_cache()
    text, left = [], NUM_TOKENS
    for group in groups:
        for completion in group.completions:
            text.append([*group.prompt.token_ids, *completion.token_ids][:left])
            left -= len(text[-1])
    return [ids for ids in text if ids]


def _hash(config: TrainConfig, prompts: Sequence[Prompt], sampling: Sampling) -> str:
    model = config.model
    parts = [
        [model.source, model.revision, model.gguf_file],
        [prompt.token_ids for prompt in prompts],
        [sampling.num_completions, sampling.max_tokens, sampling.temperature, sampling.top_p],
        [NUM_TOKENS, SEED],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
