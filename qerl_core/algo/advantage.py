"""Group-relative advantages (GRPO, arXiv:2402.03300): each completion against the others of its prompt.

P = prompts, G = completions a prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_core.config import OverlongConfig

Rewards = Sequence[Sequence[float | None]]


def group_advantages(rewards_PG: Rewards, *, group_size: int, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    """`(r - mean) / (std + eps)` within each group, float32 [P, G]; std is the sample deviation (divisor G - 1).

    A reward of None (its grader failed) is left out of mean and deviation and gets 0. A group of equal rewards, or
    with fewer than two of them, is all zeros. Every row sums to zero. ValueError for a group of another size.
    """
    rows = [_one_group(rewards, group_size, scale_by_std, eps) for rewards in rewards_PG]
    return torch.stack(rows).float() if rows else torch.zeros(0, group_size)


def _one_group(rewards: Sequence[float | None], group_size: int, scale_by_std: bool, eps: float) -> Tensor:
    if len(rewards) != group_size:
        raise ValueError(f"a group of {group_size} completions has {len(rewards)} rewards")
    row_G = torch.zeros(group_size, dtype=torch.float64)
    graded = [g for g, reward in enumerate(rewards) if reward is not None]
    values = torch.tensor([rewards[g] for g in graded], dtype=torch.float64)
    if len(graded) < 2 or bool((values == values[0]).all()):
        return row_G
    centred = values - values.mean()
    row_G[graded] = centred / (values.std() + eps) if scale_by_std else centred
    return row_G


def overlong_penalty(num_tokens: int, config: OverlongConfig | None, *, max_tokens: int) -> float:
    """What a completion of so many tokens loses: 0 up to the buffer, then linearly to the whole penalty at max_tokens.

    DAPO, arXiv:2503.14476, eq. 13.
    """
    if config is None:
        return 0.0
    beyond = num_tokens - (max_tokens - config.buffer_tokens)
    return config.penalty * min(max(beyond / config.buffer_tokens, 0.0), 1.0)


def has_signal(advantages_PG: Tensor) -> Tensor:
    """Which groups have any gradient: bool [P]."""
    return (advantages_PG != 0).any(dim=1)
