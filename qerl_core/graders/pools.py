"""Which pool runs which grader: the same in a dry run and in training."""

from typing import assert_never

from qerl_core.graders.multi import MultiPool, Pool
from qerl_core.graders.processes import ProcessPool
from qerl_core.graders.runner import GraderPool
from qerl_core.graders.spec import (
    FormatSpec,
    GraderSpec,
    MathSpec,
    MultiSpec,
    PythonSpec,
    ReasoningGymSpec,
    StringCheckSpec,
    TextSimilaritySpec,
)


def open_pool(spec: GraderSpec, *, num_workers: int | None = None) -> Pool:
    """A pool for a grader, to be entered. `num_workers` calls run at a time, for each grader of a `multi`."""
    if isinstance(spec, MultiSpec):
        return MultiPool(spec, {name: open_pool(part, num_workers=num_workers) for name, part in spec.graders.items()})
    if isinstance(spec, TextSimilaritySpec | FormatSpec | ReasoningGymSpec):
        return ProcessPool(spec, num_workers=num_workers)
    if isinstance(spec, StringCheckSpec | MathSpec | PythonSpec):
        return GraderPool(spec, num_workers=num_workers)
    assert_never(spec)
