"""What leaves the loop: a step's metrics and a checkpoint's folder. Torch-free."""

import json
from pathlib import Path
from typing import Protocol

Metrics = dict[str, float]


class Observer(Protocol):
    """Whoever watches a run: the service's rows, a file, or nobody."""

    def on_phase(self, phase: str) -> None:
        """Learn what the run is at: preparing, quantizing, evaluating, training."""
        ...

    def on_note(self, message: str) -> None:
        """Learn in a sentence what a user should know of how the run goes: the path it takes, and why."""
        ...

    def on_start(self, step: int) -> None:
        """Learn the step that the run goes on from; metrics of later ones come again. -1: a new run."""
        ...

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Take the metrics of step `step` (1 is the first; 0 is the evaluation of the base). True stops the run."""
        ...

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Take a checkpoint that is whole and verified; `folder / "adapter"` is the PEFT adapter.

        A run that goes on from a checkpoint hands it over once more.
        """
        ...


class NullObserver:
    """Nobody watches."""

    def on_phase(self, phase: str) -> None:
        """Do nothing."""

    def on_note(self, message: str) -> None:
        """Do nothing."""

    def on_start(self, step: int) -> None:
        """Do nothing."""

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Never stop."""
        return False

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Do nothing."""


class JsonlObserver(NullObserver):
    """A line of JSON a step, in a file; a resumed run has each step once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, step: int) -> None:
        """Drop the lines of steps that will come again."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Append the step. Never stop."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
        return False
