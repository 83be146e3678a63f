"""Prompts in a seeded order that goes on for ever and can be resumed from its position alone. Torch-free."""

import random
from collections.abc import Sequence

from qerl_core.types import Prompt


class PromptStream:
    """All prompts once an epoch; each epoch's order follows from (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, position: int = 0) -> None:
        """ValueError if there are no prompts."""
        if not prompts:
            raise ValueError("there are no prompts")
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.position = position
        """Prompts taken so far."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; where an epoch ends the next begins."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            epoch, place = divmod(self.position, len(self.prompts))
            part = self._order(epoch)[place : place + num_prompts - len(taken)]
            taken += [self.prompts[index] for index in part]
            self.position += len(part)
        return taken

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return order
