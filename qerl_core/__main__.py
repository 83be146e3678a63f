"""Train from a TOML file, without any service: `python -m qerl_core run.toml`.

The run's folder holds metrics.jsonl, config.json and checkpoints/; the same command goes on after an interruption.
`torchrun --nproc-per-node N -m qerl_core run.toml` shares each step among N GPUs, or N processes on a CPU.
"""

import argparse
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from qerl_core import distributed
from qerl_core.config import TrainConfig
from qerl_core.errors import QerlError
from qerl_core.loop import train
from qerl_core.observer import JsonlObserver, Metrics


class ConsoleObserver(JsonlObserver):
    """The file, and a line a step on stdout."""

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Print and write the step."""
        shown = ("reward/mean", "eval/reward_mean", "loss", "mismatch/kl", "noise/sigma", "time/step_s")
        parts = (f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
        sys.stdout.write(f"step {step}: {', '.join(parts)}\n")
        sys.stdout.flush()
        return super().on_step(step, metrics)


def main() -> int:
    """Returns the exit status: 0 done, 1 the run failed, 2 the file is not a config."""
    parser = argparse.ArgumentParser(prog="python -m qerl_core", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's TOML file: a TrainConfig")
    parser.add_argument("--folder", type=Path, help="where the run lives (default: beside the file, its name)")
    parser.add_argument("--cache", type=Path, default=Path(".qerl/cache"), help="converted and quantized models")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    folder: Path = args.folder or args.run.with_suffix("")
    try:
        config = TrainConfig.from_toml(args.run)
        distributed.start()
        folder.mkdir(parents=True, exist_ok=True)
        if distributed.rank() == 0:
            (folder / "config.json").write_text(config.model_dump_json(indent=2))
    except (OSError, ValueError) as error:  # not there, not TOML, not a config
        problem = "; ".join(_problems(error)) if isinstance(error, ValidationError) else str(error)
        sys.stderr.write(f"error: {problem}\n")
        return 2
    try:
        train(config, folder, ConsoleObserver(folder / "metrics.jsonl"), cache=args.cache)
    except QerlError as error:
        sys.stderr.write(f"error ({error.code}): {error}\n")
        return 1
    finally:
        distributed.stop()
    sys.stdout.write(f"done: {folder / 'checkpoints'}\n")
    return 0


def _problems(error: ValidationError) -> list[str]:
    return [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]


if __name__ == "__main__":
    sys.exit(main())
