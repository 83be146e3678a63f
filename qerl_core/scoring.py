"""Completions to rewards. A failed grader is an error that is counted, never a reward."""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from qerl_core.errors import GraderFailed
from qerl_core.graders.runner import GradeRequest
from qerl_core.observer import Metrics
from qerl_core.types import Grade, Group

WINDOW = 500
MAX_ERROR_FRAC = 0.1


class Grading(Protocol):
    """Whoever turns completions into grades: a `GraderPool`, or several of them together."""

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order."""
        ...


class Scorer:
    """Grades groups and gives up when more than a tenth of the last grades were errors."""

    def __init__(self, pool: Grading) -> None:
        self.pool = pool
        self.recent: deque[Grade] = deque(maxlen=WINDOW)

    def score(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards [P][G]; None where the grader failed. GraderFailed with the first errors if that is too often."""
        requests = [GradeRequest(group.prompt.item, c.text) for group in groups for c in group.completions]
        grades = self.pool.grade(requests)
        self.recent.extend(grades)
        errors = [grade for grade in self.recent if grade.reward is None]
        if len(errors) > MAX_ERROR_FRAC * len(self.recent):
            kinds = "; ".join(dict.fromkeys(f"{grade.error_type}: {grade.error}" for grade in errors))
            raise GraderFailed(f"{len(errors)} of the last {len(self.recent)} grades were errors. {kinds[:2000]}")
        rewards = iter([grade.reward for grade in grades])
        return [[next(rewards) for _ in group.completions] for group in groups]


def summarize(groups: Sequence[Group], rewards_PG: Sequence[Sequence[float | None]]) -> Metrics:
    """What a batch of rollouts looks like. Rewards are over the completions that have one."""
    completions = [completion for group in groups for completion in group.completions]
    rewards = [reward for row in rewards_PG for reward in row if reward is not None]
    lengths = [len(completion.token_ids) for completion in completions]
    metrics: Metrics = {
        "grader/error_frac": 1 - len(rewards) / len(completions),
        "completion/mean_tokens": fmean(lengths),
        "completion/truncated_frac": fmean(completion.finish_reason == "length" for completion in completions),
        "tokens/rollout": float(sum(lengths)),
    }
    if rewards:
        mean = fmean(rewards)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = fmean((reward - mean) ** 2 for reward in rewards) ** 0.5
    return metrics
