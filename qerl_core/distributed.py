"""Several processes as one run, a GPU each: every one has the whole policy, and a part of each batch.

Started by `torchrun`; alone, everything here does nothing. Each process takes its part of the prompts and of the
micro-batches; completions, rewards and gradients are put together, so all of them take the same step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def start() -> None:
    """Join the other processes, if `torchrun` started this one."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())


def stop() -> None:
    """Leave them."""
    if _several():
        dist.destroy_process_group()


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number; 0 speaks for all."""
    return dist.get_rank() if _several() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _several() else 1


def part(num_items: int) -> slice:
    """This process's share of a list: neighbours, shares that differ by one at most."""
    return slice(num_items * rank() // size(), num_items * (rank() + 1) // size())


def gathered(items: Sequence[T]) -> list[T]:
    """The shares of all, in order."""
    if not _several():
        return list(items)
    shares: list[list[T]] = [[] for _ in range(size())]
    dist.all_gather_object(shares, list(items))
    return [item for share in shares for item in share]


def added(values: Mapping[str, float]) -> dict[str, float]:
    """The sum over all by name; who lacks a name adds nothing."""
    total: Counter[str] = Counter()
    for share in gathered([dict(values)]):
        total.update(share)
    return dict(total)


def add_up(tensors: Sequence[Tensor]) -> None:
    """Let each tensor be the sum of everyone's, in place."""
    if not _several() or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def agreed(value: bool) -> bool:
    """What process 0 says. Everyone waits here for it."""
    return gathered([value])[0]
