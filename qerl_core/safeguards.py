"""Signs that a run has gone wrong although nothing failed. Torch-free: whoever watches a run asks, after each step.

A window is the last WINDOW steps; what it is held against is the run's first WINDOW steps. Shorter or more certain
answers are often what a reward teaches, so a collapse of length or entropy counts only if the reward has not risen.
"""

from collections import deque
from statistics import fmean

from qerl_core.config import SafeguardsConfig
from qerl_core.observer import Metrics

WINDOW = 5
_WATCHED = ("reward/mean", "grader/error_frac", "mismatch/kl", "policy/entropy", "completion/mean_tokens")


class Watch:
    """Takes the metrics of steps in their order, those before a resume included."""

    def __init__(self, config: SafeguardsConfig) -> None:
        self.config = config
        self._first: list[Metrics] = []
        self._last: deque[Metrics] = deque(maxlen=WINDOW)

    def take(self, step: int, metrics: Metrics) -> str | None:
        """Why the run should stop at this step; None if it looks healthy. Step 0, which is the base, tells nothing."""
        if step == 0:
            return None
        seen = {name: metrics[name] for name in _WATCHED if name in metrics}
        if len(self._first) < WINDOW:
            self._first.append(seen)
        self._last.append(seen)
        if len(self._last) < WINDOW:
            return None
        for fault in (self._graders(), self._kl(), self._collapse("policy/entropy", self.config.min_entropy_ratio),
                      self._collapse("completion/mean_tokens", self.config.min_length_ratio)):  # fmt: skip
            if fault is not None:
                return fault
        return None

    def _graders(self) -> str | None:
        found, limit = _mean(self._last, "grader/error_frac"), self.config.max_grader_error_frac
        if limit is None or found is None or found <= limit:
            return None
        return f"{found:.1%} of the grades of the last {WINDOW} steps were errors, above max_grader_error_frac {limit}"

    def _kl(self) -> str | None:
        found, limit = _mean(self._last, "mismatch/kl"), self.config.max_kl
        if limit is None or found is None or found <= limit:
            return None
        return (
            f"KL(rollout || policy) was {found:.3g} nats a token over the last {WINDOW} steps, above max_kl {limit}: "
            "the sampler is no longer the policy that is trained"
        )

    def _collapse(self, name: str, limit: float | None) -> str | None:
        before, found = _mean(self._first, name), _mean(self._last, name)
        reward_before, reward = _mean(self._first, "reward/mean"), _mean(self._last, "reward/mean")
        if limit is None or before is None or found is None or reward_before is None or reward is None:
            return None
        if found >= limit * before or reward > reward_before:
            return None
        what = {"policy/entropy": "the policy's entropy", "completion/mean_tokens": "the completions' mean length"}[
            name
        ]
        return (
            f"{what} fell from {before:.3g} to {found:.3g}, below {limit} of what it was, and the reward went from "
            f"{reward_before:.3g} to {reward:.3g}"
        )


def _mean(rows: "list[Metrics] | deque[Metrics]", name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None
