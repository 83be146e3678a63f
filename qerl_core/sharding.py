"""An engine of which each process runs its part, and all have the whole. See `distributed.py`."""

from collections.abc import Sequence

from qerl_core import distributed
from qerl_core.rollout.engine import OnCompletion, RolloutEngine, Sampling
from qerl_core.types import Group, Prompt


class ShardedEngine:
    """A `RolloutEngine` of which each process samples for its part of the prompts."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def rollout(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        sigma: float,
        seed: int,
        first: int = 0,
        on_completion: OnCompletion | None = None,
    ) -> list[Group]:
        """See `RolloutEngine`. The same groups however many processes there are; each hears of its own completions."""
        mine = distributed.part(len(prompts))
        groups: list[Group] = []
        if some := prompts[mine]:
            groups = self.engine.rollout(
                some, sampling, sigma=sigma, seed=seed, first=first + mine.start, on_completion=on_completion
            )
        return distributed.gathered(groups)
