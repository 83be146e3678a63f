"""An engine and graders of which each process runs its part, and all have the whole. See `distributed.py`."""

from collections.abc import Sequence

from qerl_core import distributed
from qerl_core.graders.runner import GradeRequest, GraderPool
from qerl_core.rollout.engine import RolloutEngine, Sampling
from qerl_core.types import Grade, Group, Prompt


class ShardedEngine:
    """A `RolloutEngine` of which each process samples for its part of the prompts."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def rollout(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, sigma: float, seed: int, first: int = 0
    ) -> list[Group]:
        """See `RolloutEngine`. The same groups however many processes there are."""
        mine = distributed.part(len(prompts))
        some = prompts[mine]
        groups = self.engine.rollout(some, sampling, sigma=sigma, seed=seed, first=first + mine.start) if some else []
        return distributed.gathered(groups)


class ShardedPool:
    """A `GraderPool` of which each process grades its part."""

    def __init__(self, pool: GraderPool) -> None:
        self.pool = pool

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order."""
        return distributed.gathered(self.pool.grade(requests[distributed.part(len(requests))]))
