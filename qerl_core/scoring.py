"""Completions to rewards, while others are still sampled. A failed grader is an error that is counted, never a reward.

P = prompts, G = completions a prompt.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from statistics import fmean

from qerl_core import distributed
from qerl_core.errors import GraderFailed
from qerl_core.graders.multi import Pool
from qerl_core.graders.runner import GradeRequest
from qerl_core.observer import Metrics
from qerl_core.types import Completion, Grade, Group, Prompt

WINDOW = 500
MAX_ERROR_FRAC = 0.1


class Scorer:
    """Grades batches and gives up when more than a tenth of the last grades were errors."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.recent: deque[Grade] = deque(maxlen=WINDOW)

    @contextmanager
    def grading(self, prompts: Sequence[Prompt]) -> Iterator["Grading"]:
        """A batch, graded inside while it is sampled. What has no grade yet when an error leaves it is cancelled."""
        batch = Grading(self, prompts)
        try:
            yield batch
        finally:
            batch.cancel()

    def count(self, grades: Sequence[Grade]) -> None:
        """Take note of a batch's grades. GraderFailed with the first errors if there are too many."""
        self.recent.extend(grades)
        errors = [grade for grade in self.recent if grade.reward is None]
        if len(errors) > MAX_ERROR_FRAC * len(self.recent):
            kinds = "; ".join(dict.fromkeys(f"{grade.error_type}: {grade.error}" for grade in errors))
            raise GraderFailed(f"{len(errors)} of the last {len(self.recent)} grades were errors. {kinds[:2000]}")


class Grading:
    """The grades to come of a batch's completions."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self.scorer = scorer
        self.prompts = prompts
        self._grades: dict[tuple[int, int], Future[Grade]] = {}
        self.grades: list[Grade] = []
        """All of the batch, once `rewards` has been asked for."""

    def take(self, place: int, number: int, completion: Completion) -> None:
        """Start to grade a completion: what an engine is given as `on_completion`."""
        assert (place, number) not in self._grades
        request = GradeRequest(self.prompts[place].item, completion.text)
        self._grades[place, number] = self.scorer.pool.submit(request)

    def rewards(self) -> list[list[float | None]]:
        """Rewards [P][G] when all are there, those of other processes too; None where the grader failed.

        In the order of places and numbers, whatever ended first. GraderFailed: see `Scorer.count`.
        """
        mine = [(place, self._grades[place, number].result()) for place, number in sorted(self._grades)]
        grades = distributed.gathered(mine)
        self.grades = [grade for _, grade in grades]
        self.scorer.count(self.grades)
        return [[grade.reward for _, grade in group] for _, group in groupby(grades, key=lambda graded: graded[0])]

    def cancel(self) -> None:
        """Grade nothing more."""
        for grade in self._grades.values():
            grade.cancel()


def by_grader(grades: Sequence[Grade]) -> Metrics:
    """The mean reward and the part of errors of each grader in a `multi`, and the tokens that judges took."""
    metrics: Metrics = {}
    for name in dict.fromkeys(name for grade in grades for name in grade.parts):
        parts = [grade.parts[name] for grade in grades if name in grade.parts]
        rewards = [part.reward for part in parts if part.reward is not None]
        metrics[f"grader/{name}/error_frac"] = 1 - len(rewards) / len(parts)
        if rewards:
            metrics[f"grader/{name}/mean"] = fmean(rewards)
    if tokens := sum(count for grade in grades for count in grade.num_tokens.values()):
        metrics["tokens/judge"] = float(tokens)
    return metrics


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
