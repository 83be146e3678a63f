"""Lay groups out as rows for one forward: a prompt once, then each of its completions behind a mask of its own.

    row        p p p p a a a b b        a, b: completions of the prompt p
    position   0 1 2 3 4 5 6 4 5        each goes on from the prompt
    sees       a: p and a;  b: p and b  so each log-prob is what it would be in a row of its own

With G completions of c tokens behind a prompt of p, a row has p + G c tokens instead of G (p + c). The mask is dense,
so a row grows to `max_row_tokens` at most and then a new one starts; with `max_row_tokens=0` every completion has a
row to itself, which is the slow twin.

R = rows, L = tokens of the longest row, B = sequences (completions), T = tokens of the longest completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_core.types import Group

PAD = 0  # any id: pads are masked by length


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with some of its completions; `sequences` are the completions' numbers in the whole batch."""

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """The row's length."""
        return len(self.prompt) + sum(map(len, self.completions))


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors of some rows."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    attention_mask_R1LL: Tensor
    """True where a token sees another."""
    predictors: Tensor
    """int64 [N]: the flat place in [R, L] of the token before each completion token, whose output predicts it."""
    targets: Tensor
    """int64 [N]: the completion tokens themselves."""
    where: tuple[Tensor, Tensor]
    """Their places in [B, T]."""


def make_rows(groups: Sequence[Group], *, max_row_tokens: int) -> list[Row]:
    """Rows of every completion that has a token, in the order of the groups. Sequences count through all groups."""
    rows, sequence = [], 0
    for group in groups:
        prompt = group.prompt.token_ids
        taken: list[tuple[int, tuple[int, ...]]] = []
        length = len(prompt)
        for completion in group.completions:
            tokens = completion.token_ids
            if taken and length + len(tokens) > max_row_tokens:
                rows.append(_row(prompt, taken))
                taken, length = [], len(prompt)
            if tokens:
                taken.append((sequence, tokens))
                length += len(tokens)
            sequence += 1
        if taken:
            rows.append(_row(prompt, taken))
    return rows


def _row(prompt: tuple[int, ...], taken: list[tuple[int, tuple[int, ...]]]) -> Row:
    sequences, completions = zip(*taken, strict=True)
    return Row(prompt, completions, sequences)


def micro_batches(rows: Sequence[Row], *, max_tokens: int) -> Iterator[list[Row]]:
    """Cut rows, longest first, so that each part has at most `max_tokens` with its padding; a longer row goes alone."""
    part: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.num_tokens):
        if part and part[0].num_tokens * (len(part) + 1) > max_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def collate(rows: Sequence[Row], device: torch.device) -> Rows:
    """Pad rows on the right and say where each completion token is predicted."""
    num_rows, length = len(rows), max(row.num_tokens for row in rows)
    token_ids = torch.full((num_rows, length), PAD, dtype=torch.long)
    positions = torch.zeros(num_rows, length, dtype=torch.long)
    segment = torch.full((num_rows, length), -1, dtype=torch.long)  # 0 the prompt, 1.. its completions, -1 padding
    predictors: list[int] = []
    targets: list[int] = []
    sequences: list[int] = []
    steps: list[int] = []
    for r, row in enumerate(rows):
        p = len(row.prompt)
        tokens = [*row.prompt, *(token for completion in row.completions for token in completion)]
        token_ids[r, : len(tokens)] = torch.tensor(tokens)
        positions[r, :p] = torch.arange(p)
        segment[r, :p] = 0
        start = p
        for s, completion in enumerate(row.completions):
            c = len(completion)
            positions[r, start : start + c] = torch.arange(p, p + c)
            segment[r, start : start + c] = s + 1
            before = [p - 1, *range(start, start + c - 1)]
            predictors += [r * length + place for place in before]
            targets += completion
            sequences += [row.sequences[s]] * c
            steps += range(c)
            start += c

    order = torch.arange(length)
    causal_LL = order[:, None] >= order[None, :]
    same_RLL = segment[:, :, None] == segment[:, None, :]
    prompt_R1L = (segment == 0)[:, None, :]
    mask_R1LL = (causal_LL & (same_RLL | prompt_R1L))[:, None]
    return Rows(
        token_ids.to(device), positions.to(device), mask_R1LL.to(device),
        torch.tensor(predictors, device=device), torch.tensor(targets, device=device),
        (torch.tensor(sequences, device=device), torch.tensor(steps, device=device)),
    )  # fmt: skip


def length_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """bool [B, T]: True for the first `lengths[b]` places of row b. T is the longest length."""
    longest = max(lengths, default=0)
    return torch.arange(longest, device=device)[None, :] < torch.tensor(lengths, device=device)[:, None]


def scatter_logprobs(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Ragged log-probs as float32 [B, T], zero where there is none."""
    out = torch.zeros(len(values), max(map(len, values), default=0))
    for row, numbers in zip(out, values, strict=True):
        row[: len(numbers)] = torch.tensor(numbers)
    return out.to(device)
