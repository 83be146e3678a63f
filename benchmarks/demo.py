"""`python -m benchmarks.demo`: the demo for three seeds, and a control that may not learn (its rate is zero).

Writes the table, wall times and curves to `baselines/cpu/`. Takes about half an hour on two cores.
"""

import argparse
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

from app.demo import DemoResult, run
from benchmarks.record import BASELINES, Row, write

GAIN = 0.30
TRAIN_S, TOTAL_S = 540, 720


def rows_of(results: dict[str, DemoResult]) -> list[Row]:
    """Accuracy and wall times, with their goals."""
    rows = []
    for case, result in results.items():
        gain = result.adapter_accuracy - result.base_accuracy
        control = result.learning_rate == 0
        accuracy = Row(
            case, "held_out_accuracy", "higher", result.adapter_accuracy, {"base": result.base_accuracy},
            goal="= base" if control else f"base + {GAIN:.2f}", met=gain == 0 if control else gain >= GAIN,
        )  # fmt: skip
        rows.append(accuracy)
        if not control:
            train = Row(case, "train_s", "lower", result.train_s, goal=f"< {TRAIN_S} s", met=result.train_s < TRAIN_S)
            total = Row(case, "total_s", "lower", result.total_s, goal=f"< {TOTAL_S} s", met=result.total_s < TOTAL_S)
            rows += [train, total]
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
    return [*rows, Row("largest process", "peak_gib", "lower", peak_gib, goal="< 8 GiB", met=peak_gib < 8)]


def draw(results: dict[str, DemoResult], path: Path) -> None:
    """All reward curves in one picture."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for case, result in results.items():
        label = f"{case}: held out {result.base_accuracy:.2f} -> {result.adapter_accuracy:.2f}"
        axes.plot(range(1, len(result.rewards) + 1), result.rewards, label=label)
    axes.set(xlabel="step", ylabel="mean training reward", ylim=(-0.02, 1.02))
    axes.legend(loc="center right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run them one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    results = {}
    with TemporaryDirectory() as temporary:
        runs = [(f"seed{seed}", seed, 5e-4) for seed in args.seeds] + [("seed0/rate0", 0, 0.0)]
        for case, seed, rate in runs:
            folder = Path(temporary) / case.replace("/", "-")
            results[case] = run(folder, cache=Path(temporary) / "cache", seed=seed, learning_rate=rate)
    curves = {case: {"rewards": result.rewards, "times": result.times} for case, result in results.items()}
    path = write("demo", "cpu", rows_of(results), curves=curves)
    draw(results, BASELINES / "cpu" / "demo.png")
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
