"""What samples completions. `hf_engine` is the slow twin of every other engine."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qerl_core.types import Completion, Group, Prompt

OnCompletion = Callable[[int, int, Completion], None]
"""Takes a completion that has ended, after its prompt's place in the batch and its own number."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn."""

    num_completions: int
    """Completions a prompt."""
    max_tokens: int
    """A completion is cut after so many."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """The smallest set of tokens with this probability is drawn from."""


def completion_seed(seed: int, place: int, number: int) -> int:
    """What the draws of a completion follow from: the step's seed, its prompt's place in the batch, its number."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) + number


class RolloutEngine(Protocol):
    """Samples from the policy as it is, under noise or without."""

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
        """A group for each prompt, in order. Norm noise of `sigma` is drawn anew from `seed`, as the tokens are.

        `first` is the place of the first prompt in its batch: a completion's draws follow from `completion_seed` of
        its place and number, whatever is sampled beside it. Log-probs are of the distribution that was drawn from.
        After it, the policy is clean. RolloutFailed if the engine cannot give what was asked for.

        `on_completion` is called in this thread, once for each completion that this engine samples, as soon as it has
        ended while others are still sampled; what it raises ends the rollout.
        """
        ...
