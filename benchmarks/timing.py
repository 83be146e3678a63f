"""Times on a GPU: medians of many runs, over inputs that do not stay in the cache. A wrong kernel is never timed."""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor


def gpu_microseconds(calls: Sequence[Callable[[], object]], *, repeats: int = 20, graph: bool = True) -> float:
    """Median time of a call, rotating through `calls` so that each finds cold weights; CUDA graphs hide launches."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    replay: Callable[[], object]
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            for call in calls:
                call()
        replay = recorded.replay
    else:

        def replay() -> None:
            for call in calls:
                call()

    replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(median(times))


@torch.no_grad()
def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float32; NaN never passes a bound."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def require_close(name: str, found: Tensor, wanted: Tensor, bound: float) -> float:
    """The relative error. RuntimeError if it is not within the bound."""
    error = relative_error(found, wanted)
    if not error <= bound:
        raise RuntimeError(f"{name} is wrong: relative error {error:.2e}, {bound:.0e} is allowed")
    return error


def gpu_milliseconds(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 5, warm_up: int = 2, at_once: int = 1
) -> dict[str, float]:
    """Median time of each call, all of them once a round, in a new order each: a hot card slows them alike.

    `at_once` calls in a row are timed together: as in training, the GPU is given work before it has finished.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(at_once):
                call()
            end.record()
            torch.cuda.synchronize()
            if number >= warm_up:
                times[name].append(start.elapsed_time(end) / at_once)
    return {name: float(median(found)) for name, found in times.items()}
