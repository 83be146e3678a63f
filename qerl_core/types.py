"""The values that move through the loop. Torch-free: tokens and log-probs are plain tuples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Item = dict[str, Any]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the data set, rendered."""

    index: int
    """Position of the row in its file, blank lines not counted."""
    item: Item
    """The row's JSON object, as graders see it."""
    token_ids: tuple[int, ...]
    """The chat template's output up to where the assistant speaks; never empty."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """What was sampled, its EOS included; may be empty."""
    rollout_logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from: noise, temperature and top_p included."""
    text: str
    """The decoded answer without special tokens."""
    finish_reason: FinishReason
    """`length` if it was cut at max_completion_tokens."""


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt: the unit in which advantages are taken."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's answer about one completion: a reward, or the error that kept it from one."""

    reward: float | None
    """Finite; None if the grader failed. Never a guess."""
    error_type: str | None = None
    """OpenAI's name of the error, such as `python_grader_runtime_error`."""
    error: str | None = None
    """What happened, with the traceback of the user's code if there is one."""
    parts: Mapping[str, "Grade"] = field(default_factory=dict)
    """The grades of a `multi`'s graders by name."""
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """What a judge's models were paid for, by model."""
