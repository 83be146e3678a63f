"""`python -m benchmarks.step`: a whole GRPO step of a policy on real shapes, on one GPU: rollouts, then the update.

Random weights, 32 prompts x 8 completions, 256 tokens in and 512 out, LoRA of rank 32 on the seven projections, AdamW.
Ours has one base for engine and trainer; its peers are those of `step_peers.py`. Each has a process of its own, the
same prompts and full lengths. Says what a step takes, its parts, and the most memory that was in use. Writes
`baselines/<machine>/step.json`; a peer that fails is not in it. `--size tiny --machine cpu` tries the script itself,
with slow engines.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.record import Row, write
from benchmarks.rollout import SIZES, write_bf16, write_nvfp4
from benchmarks.step_peers import Memory, QerlEngine, QerlPolicy, measure_trl, now, qerl_peft, write_words
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
PEERS = {"trl_bf16_lora": 1.5, "trl_qlora": 2.5, "qerl_procedure": 2.0}
"""How many times as long a step of theirs is to take, at 7B."""
MEMORY_GOALS = {"32b": "< 80 GB"}
TIMEOUT_S = 900


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


def draw_prompts(size: str, step: int) -> torch.Tensor:
    """Token ids [P, tokens in]: every way gets the same."""
    num_prompts, _, tokens_in, _ = SHAPES[size]
    draw = torch.Generator().manual_seed(step)
    return torch.randint(10, 500 if size == "tiny" else 90_000, (num_prompts, tokens_in), generator=draw)


# One way, in a process of its own


def measure(way: str, size: str, fraction: float, steps: int, root: Path) -> dict[str, float]:
    """The figures of a way by metric: medians, after one step that is not counted."""
    config = config_of(size, fraction)
    if way.startswith("trl"):
        batches = [draw_prompts(size, step) for step in range(steps + 1)]
        return measure_trl(folder_of(root, "bf16", size), config, batches, quantized=way == "trl_qlora")
    memory = Memory()
    policy = open_policy(way, config, folder_of(root, "nvfp4", size))
    engine = open_engine(way, config, policy.model, memory)
    return measure_steps(policy, engine, memory, size, steps)


def folder_of(root: Path, kind: str, size: str) -> Path:
    """A model of random weights, which the first process that wants it writes."""
    folder, part = root / kind, root / f"{kind}.part"
    if not folder.exists():
        if kind == "nvfp4":
            write_nvfp4(part, size)
        else:
            write_bf16(part, size)
            write_words(part, SIZES[size]["vocab_size"])
        part.rename(folder)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return folder


def open_policy(way: str, config: TrainConfig, folder: Path) -> Policy:
    """As `open_model` does it, without a tokenizer, and with a LoRA that is not zero; or as QeRL does it."""
    from peft import get_peft_model

    causal: Any = load_model(folder, compute_dtype=torch.bfloat16, device=default_device())
    if way == "ours":
        peft = get_peft_model(causal, peft_config(config.lora))
        follow_autocast(peft)
        checkpoint_activations(causal)
        chunk_mlps(causal)
    else:
        peft = qerl_peft(causal, config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    kind = Policy if way == "ours" else QerlPolicy
    return kind(config, PolicyModel(peft, causal, NoTokenizer(folder), frozenset(), config.model.id))


def open_engine(way: str, config: TrainConfig, model: PolicyModel, memory: Memory) -> RolloutEngine:
    """vLLM over the policy's tensors, or QeRL's; on a CPU the slow one."""
    if model.device.type == "cpu":
        return HfEngine(model)
    from qerl_core.rollout.vllm_engine import VllmEngine

    settings: dict[str, Any] = {
        "rank": config.lora.rank, "memory_fraction": config.rollout.memory_fraction,
        "max_tokens": config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        "max_sequences": config.rollout.num_prompts * config.rollout.group_size,
    }  # fmt: skip
    return VllmEngine(model, **settings) if way == "ours" else QerlEngine(model, memory, **settings)


def measure_steps(policy: Policy, engine: RolloutEngine, memory: Memory, size: str, steps: int) -> dict[str, float]:
    """Steps of a policy of ours or QeRL's; of ours also what it takes to give the engine new weights."""
    num_prompts, group_size, _, tokens_out = SHAPES[size]
    loads = torch.cuda.is_available() and not isinstance(engine, QerlEngine)
    times: dict[str, list[float]] = {"load_ms": [], "rollout_s": [], "update_s": [], "step_s": []}
    sampling = Sampling(group_size, tokens_out)
    for step in range(steps + 1):
        prompts = [Prompt(i, {}, tuple(row)) for i, row in enumerate(draw_prompts(size, step).tolist())]
        advantages = torch.randn(num_prompts, group_size, generator=torch.Generator().manual_seed(step))
        if loads:
            started = now()
            engine.load(sigma=0.01, seed=step)  # type: ignore[attr-defined]
            times["load_ms"].append((now() - started) * 1e3)
        started = now()
        groups = engine.rollout(prompts, sampling, sigma=0.01, seed=step)
        sampled = now()
        metrics = policy.update(groups, advantages)
        ended = now()
        memory.look()
        if metrics["tokens/trained"] != num_prompts * group_size * tokens_out:
            raise RuntimeError(f"trained on {metrics['tokens/trained']} tokens")
        times["rollout_s"].append(sampled - started)
        times["update_s"].append(ended - sampled)
        times["step_s"].append(ended - started)
    found = {name: median(values[1:]) for name, values in times.items() if values}
    return found | memory.figures() | {"logprob_gap": metrics["mismatch/logprob_gap"]}


# All of them


def run(way: str, size: str, fraction: float, steps: int, root: Path) -> dict[str, float] | None:
    """A way's figures, from a process of its own; None, and the end of what it said, if it fails."""
    command = [sys.executable, "-m", "benchmarks.step", "--child", way, str(root), "--size", size]
    command += ["--memory-fraction", str(fraction), "--steps", str(steps)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=os.environ | offline
        )
    except subprocess.TimeoutExpired:
        print(way, f"took more than {TIMEOUT_S} s", flush=True)  # noqa: T201
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        print(way, "failed:", done.stderr[-3000:], flush=True)  # noqa: T201
        return None
    found: dict[str, float] = json.loads(lines[-1].removeprefix("FOUND "))
    print(size, way, found, flush=True)  # noqa: T201
    return found


def rows_of(size: str, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """A row for each metric of ours, with those peers that have it."""
    num_prompts, group_size, _, _ = SHAPES[size]
    rows = []
    for metric, value in found["ours"].items():
        peers = {way: figures[metric] for way, figures in found.items() if way != "ours" and metric in figures}
        rows.append(judged(size, Row(f"{size}/{num_prompts}x{group_size}", metric, "lower", value, peers)))
    return rows


def judged(size: str, row: Row) -> Row:
    """The row with its goal, if it has one, and whether it is met, if all that the goal speaks of is there."""
    if row.metric == "peak_gib" and size in MEMORY_GOALS:
        return replace(row, goal=MEMORY_GOALS[size]).judged(lambda ours, _: ours * 2**30 < 80e9)
    if row.metric != "step_s" or size != "7b":
        return row
    row = replace(row, goal="faster: " + ", ".join(f"{factor:g} x {name}" for name, factor in PEERS.items()))
    if row.peers.keys() != PEERS.keys():
        return row
    return row.judged(lambda ours, peers: all(ours * factor <= peers[name] for name, factor in PEERS.items()))


def main() -> None:
    """Measure ours, then each peer, and write the record each time: a run that is cut short keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="7b")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer-steps", type=int, default=2)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, root = args.child
        print("FOUND", json.dumps(measure(way, args.size, args.memory_fraction, args.steps, Path(root))))  # noqa: T201
        return
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as temporary:
        for way in ("ours", *args.peers):
            steps = args.steps if way == "ours" else args.peer_steps
            figures = run(way, args.size, args.memory_fraction, steps, Path(temporary))
            if figures is not None:
                found[way] = figures
            elif way == "ours":
                sys.exit(1)
            rows = rows_of(args.size, found)
            if args.size != "tiny":
                write("step", args.machine, rows)
    print(*rows, sep="\n")  # noqa: T201


SIZES["tiny"] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip


if __name__ == "__main__":
    main()
