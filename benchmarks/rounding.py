"""`python -m benchmarks.rounding`: what each way to hold the base costs a policy that is trained on it.

The demo's task (SmolLM2-135M adds two digits; held-out questions, greedy) by `qerl_core.loop` alone, without the
service: BF16 and every rounding method, several seeds. Writes `baselines/<machine>/rounding.json` after each run, so
one that is cut short keeps what it has.
"""

import argparse
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, get_args

from app.demo import GRADER, LORA, RL, STEPS, write_questions
from benchmarks.quantization import MODEL
from benchmarks.record import Row, write
from qerl_core.config import RoundingMethod, TrainConfig
from qerl_core.loop import train
from qerl_core.observer import Metrics, NullObserver

WAYS = ("bf16", *get_args(RoundingMethod))
DEFAULT = "gptq"
"""What `auto` is on a GPU."""
KEEP = 0.95
"""Of BF16's accuracy after training."""


class Evaluations(NullObserver):
    """Keeps the accuracy of the base and of the trained policy."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Take an evaluation."""
        if "eval/reward_mean" in metrics:
            self.accuracy.append(metrics["eval/reward_mean"])
        return False


def config_of(way: str, seed: int, folder: Path) -> TrainConfig:
    """The demo's run on a base that is held in this way."""
    held: dict[str, Any] = {"quantization": "none"} if way == "bf16" else {"quantization_method": way}
    train_path, valid_path = write_questions(folder)
    return TrainConfig.model_validate(
        {
            "model": MODEL.model_dump() | held,
            "data": {"train_path": train_path, "valid_path": valid_path},
            "grader": {"type": "python", "name": "sum", "source": GRADER},
            "lora": LORA,
            "rollout": {
                "num_prompts": 4, "group_size": RL["group_size"], "max_prompt_tokens": RL["max_prompt_tokens"],
                "max_completion_tokens": RL["max_completion_tokens"],
            },
            "optimizer": {"learning_rate": 5e-4, "warmup_steps": RL["warmup_steps"], "beta2": RL["beta2"]},
            "micro_batch_tokens": RL["micro_batch_tokens"],
            "max_idle_steps": RL["max_idle_steps"],
            "num_steps": STEPS,
            "checkpoint_every": STEPS,
            "seed": seed,
        }
    )  # fmt: skip


def rows_of(found: dict[str, list[list[float]]]) -> list[Row]:
    """Means over seeds, before and after training, beside BF16's."""
    rows = []
    for way, runs in found.items():
        for place, name in ((0, "base"), (-1, "trained")):
            values = [run[place] for run in runs]
            peers = {"bf16": fmean(run[place] for run in found["bf16"])}
            row = Row(
                f"smollm2/{way}/{name}", "held_out_accuracy", "higher", fmean(values), peers,
                spread=max(values) - min(values),
            )  # fmt: skip
            if way == DEFAULT and name == "trained":
                row = Row(
                    row.case, row.metric, "higher", row.ours, peers, row.spread, goal=f"{KEEP} x bf16"
                ).judged(lambda ours, peers: ours >= KEEP * peers["bf16"])  # fmt: skip
            rows.append(row)
    return rows


def main() -> None:
    """Run every way with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)}; all if none is named, bf16 always")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--cache", type=Path, default=Path(".qerl/cache"), help="where converted models are kept")
    args = parser.parse_args()
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    ways = ["bf16", *(way for way in args.ways or WAYS if way != "bf16")]
    found: dict[str, list[list[float]]] = {}
    for seed in args.seeds:
        for way in ways:
            seen = Evaluations()
            with TemporaryDirectory() as temporary:
                folder = Path(temporary)
                train(config_of(way, seed, folder), folder / "run", seen, cache=args.cache)
            found.setdefault(way, []).append(seen.accuracy)
            print(way, seed, seen.accuracy, flush=True)  # noqa: T201
            path = write("rounding", args.machine, rows_of(found), seeds=args.seeds[: len(found["bf16"])])
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
