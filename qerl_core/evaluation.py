"""Held-out rows under the training prompt and grader, on the clean policy: base and adapter side by side.

    python -m qerl_core.evaluation run.toml ADAPTER

loads the adapter with `PeftModel.from_pretrained` on the run's base and prints both scores as JSON.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from peft import PeftModel

from qerl_core.calibration import calibration_text
from qerl_core.config import TrainConfig
from qerl_core.data.chat import render_prompts
from qerl_core.data.rows import read_rows
from qerl_core.graders.pools import open_pool
from qerl_core.observer import Metrics
from qerl_core.policy.model import PolicyModel, base_name, eos_ids, follow_autocast, open_base
from qerl_core.rollout.engine import RolloutEngine, Sampling
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.scoring import Scorer, summarize
from qerl_core.types import Prompt

SEED = 1_000_003  # the same draws for every policy that is compared


def held_out_prompts(config: TrainConfig, tokenizer: object) -> list[Prompt]:
    """The rendered validation rows; empty if the run has none."""
    if config.data.valid_path is None:
        return []
    items = read_rows(config.data.valid_path)[: config.evaluation.max_rows]
    return render_prompts(items, tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens)


def evaluate(engine: RolloutEngine, scorer: Scorer, prompts: Sequence[Prompt], config: TrainConfig) -> Metrics:
    """The mean reward over the prompts: greedy, or of `samples` completions a prompt. Names start with `eval/`."""
    samples = config.evaluation.samples
    sampling = Sampling(
        num_completions=samples,
        max_tokens=config.rollout.max_completion_tokens,
        temperature=0.0 if samples == 1 else config.rollout.temperature,
        top_p=1.0 if samples == 1 else config.rollout.top_p,
    )
    with scorer.grading(prompts) as grading:
        groups = engine.rollout(prompts, sampling, sigma=0.0, seed=SEED, on_completion=grading.take)
        found = summarize(groups, grading.rewards())
    names = {"reward/mean": "eval/reward_mean", "completion/mean_tokens": "eval/mean_tokens",
             "completion/truncated_frac": "eval/truncated_frac"}  # fmt: skip
    return {names[name]: value for name, value in found.items() if name in names}


def compare(config: TrainConfig, adapter: Path, cache: Path) -> dict[str, Metrics]:
    """Evaluate the run's base and, on it, an adapter folder as a user would load it."""
    text = calibration_text(config, cache)
    causal, tokenizer = open_base(config.model, cache, dtype=config.dtype, calibration=text)
    prompts = held_out_prompts(config, tokenizer)
    peft = PeftModel.from_pretrained(causal, str(adapter))
    follow_autocast(peft)
    model = PolicyModel(peft, causal, tokenizer, eos_ids(causal, tokenizer), base_name(config.model))
    engine = HfEngine(model)
    with open_pool(config.grader) as pool:
        scorer = Scorer(pool)
        with peft.disable_adapter():
            base = evaluate(engine, scorer, prompts, config)
        return {"base": base, "adapter": evaluate(engine, scorer, prompts, config)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m qerl_core.evaluation", description="Score base and adapter.")
    parser.add_argument("run", type=Path, help="the run's TOML file")
    parser.add_argument("adapter", type=Path, help="a PEFT adapter folder")
    parser.add_argument("--cache", type=Path, default=Path(".qerl/cache"), help="converted and quantized models")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    config = TrainConfig.from_toml(args.run)
    if config.data.valid_path is None:
        parser.error("the run has no data.valid_path to evaluate on")
    sys.stdout.write(json.dumps(compare(config, args.adapter, args.cache)) + "\n")


if __name__ == "__main__":
    main()
