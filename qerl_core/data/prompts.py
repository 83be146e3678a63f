"""Prompts in a seeded order that goes on for ever and can be resumed from its position alone. Torch-free."""

import random
from collections.abc import Sequence

from qerl_core.types import Prompt


class PromptStream:
    """All prompts once an epoch; each epoch's order follows from (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, position: int = 0) -> None:
        """ValueError if there are no prompts, or the position is negative."""
        if not prompts:
            raise ValueError("there are no prompts")
        if position < 0:
            raise ValueError(f"position {position} is negative")
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.position = position
        """Prompts taken so far."""
        self._epoch = -1
        self._order: Sequence[int] = range(len(prompts))

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; where an epoch ends the next begins. ValueError if the number is negative."""
        if num_prompts < 0:
            raise ValueError(f"num_prompts {num_prompts} is negative")
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            epoch, place = divmod(self.position, len(self.prompts))
            self._enter(epoch)
            part = self._order[place : place + num_prompts - len(taken)]
            taken += [self.prompts[index] for index in part]
            self.position += len(part)
        return taken

    def _enter(self, epoch: int) -> None:
        if self.shuffle and epoch != self._epoch:
            # Python promises that random() gives the same numbers in every version; of shuffle() it does not.
            generator = random.Random(f"{self.seed}:{epoch}")
            keys = [generator.random() for _ in self.prompts]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            self._epoch = epoch
