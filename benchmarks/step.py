"""`python -m benchmarks.step`: a whole GRPO step of a policy on real shapes, on one GPU: rollouts, then the update.

Random weights, 32 prompts x 8 completions, 256 tokens in and 512 out, LoRA of rank 32 on the seven projections. One
base for engine and trainer. Says what a step takes, its parts, and the most memory that was in use. Writes
`baselines/<machine>/step.json`. `--size tiny --machine cpu` tries the script itself, with the slow engine.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.record import Row, write
from benchmarks.rollout import SIZES, write_nvfp4
from qerl_core.config import TrainConfig
from qerl_core.policy.model import PolicyModel, checkpoint_activations, default_device, follow_autocast, peft_config
from qerl_core.policy.recompute import chunk_mlps
from qerl_core.policy.update import Policy
from qerl_core.quant.checkpoint import load_model
from qerl_core.rollout.engine import RolloutEngine, Sampling
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.types import Prompt

SHAPES = {"tiny": (2, 4, 16, 8), "7b": (32, 8, 256, 512), "32b": (32, 8, 256, 512)}
"""Prompts, completions each, tokens in and out."""
GOALS = {"32b": "< 80 GB"}


class NoTokenizer:
    """Random weights have no words."""

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)

    def decode(self, tokens: Any, **_: Any) -> str:
        """Nothing."""
        return ""


def config_of(size: str, fraction: float) -> TrainConfig:
    """The run whose step it is."""
    num_prompts, group_size, tokens_in, tokens_out = SHAPES[size]
    return TrainConfig.model_validate(
        {
            "model": {"id": size, "source": size},
            "data": {"train_path": "none"},
            "grader": {"type": "string_check", "name": "none", "input": "a", "reference": "a", "operation": "eq"},
            "lora": {"rank": 32, "alpha": 64},
            "rollout": {
                "num_prompts": num_prompts, "group_size": group_size, "max_prompt_tokens": tokens_in,
                "max_completion_tokens": tokens_out, "memory_fraction": fraction,
            },
            "dtype": "bfloat16",
        }
    )  # fmt: skip


def open_policy(config: TrainConfig, folder: Path) -> Policy:
    """As `open_model` does it, without a tokenizer, and with a LoRA that is not zero."""
    from peft import get_peft_model

    causal: Any = load_model(folder, compute_dtype=torch.bfloat16, device=default_device())
    peft = get_peft_model(causal, peft_config(config.lora))
    follow_autocast(peft)
    checkpoint_activations(causal)
    chunk_mlps(causal)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return Policy(config, PolicyModel(peft, causal, NoTokenizer(folder), frozenset(), config.model.id))


def open_engine(config: TrainConfig, model: PolicyModel) -> RolloutEngine:
    """vLLM over the policy's tensors; on a CPU the slow one."""
    if model.device.type == "cpu":
        return HfEngine(model)
    from qerl_core.rollout.vllm_engine import VllmEngine

    tokens = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    sequences = config.rollout.num_prompts * config.rollout.group_size
    return VllmEngine(
        model, rank=config.lora.rank, max_tokens=tokens, max_sequences=sequences,
        memory_fraction=config.rollout.memory_fraction,
    )  # fmt: skip


def measure(size: str, fraction: float, steps: int) -> list[Row]:
    """The step's parts in seconds, medians, after one step that is not counted; and memory."""
    config, has_gpu = config_of(size, fraction), torch.cuda.is_available()
    num_prompts, group_size, tokens_in, tokens_out = SHAPES[size]
    times: dict[str, list[float]] = {"load_ms": [], "rollout_s": [], "update_s": [], "step_s": []}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "nvfp4"
        write_nvfp4(folder, size)
        policy = open_policy(config, folder)
        engine = open_engine(config, policy.model)
    sampling = Sampling(group_size, tokens_out)
    free = []
    for step in range(steps + 1):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(10, 500 if size == "tiny" else 90_000, (num_prompts, tokens_in), generator=draw)
        prompts = [Prompt(i, {}, tuple(row)) for i, row in enumerate(ids.tolist())]
        advantages = torch.randn(num_prompts, group_size, generator=draw)
        if has_gpu:
            torch.cuda.synchronize()
            started = time.monotonic()
            engine.load(sigma=0.01, seed=step)  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            times["load_ms"].append((time.monotonic() - started) * 1e3)
        started = time.monotonic()
        groups = engine.rollout(prompts, sampling, sigma=0.01, seed=step)
        sampled = time.monotonic()
        metrics = policy.update(groups, advantages)
        if has_gpu:
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
        ended = time.monotonic()
        if metrics["tokens/trained"] != num_prompts * group_size * tokens_out:
            raise RuntimeError(f"trained on {metrics['tokens/trained']} tokens")
        times["rollout_s"].append(sampled - started)
        times["update_s"].append(ended - sampled)
        times["step_s"].append(ended - started)
    case = f"{size}/{num_prompts}x{group_size}"
    rows = [Row(case, name, "lower", median(values[1:])) for name, values in times.items() if values]
    if has_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        used = Row(case, "peak_gib", "lower", (total - min(free)) / 2**30, goal=GOALS.get(size))
        rows.append(used.judged(lambda ours, _: ours * 2**30 < 80e9) if size in GOALS else used)
    rows.append(Row(case, "logprob_gap", "lower", metrics["mismatch/logprob_gap"]))
    return rows


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="7b")
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--machine", default="h200")
    args = parser.parse_args()
    rows = measure(args.size, args.memory_fraction, args.steps)
    print(*rows, sep="\n")  # noqa: T201
    if args.size != "tiny":
        print(write("step", args.machine, rows))  # noqa: T201


SIZES["tiny"] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip


if __name__ == "__main__":
    main()
