"""`multi`: a formula over the rewards of graders that run side by side."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from qerl_core.graders import formula
from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.runner import GradeRequest
from qerl_core.graders.spec import MultiSpec
from qerl_core.types import Grade


class Pool(AbstractContextManager["Pool", None], Protocol):
    """What grades completions: every kind of grader is behind one of these. To be entered."""

    def submit(self, request: GradeRequest) -> Future[Grade]:
        """The grade to come; a grader that fails is one too."""
        ...

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order."""
        ...


class MultiPool:
    """A pool over the pools of its graders."""

    def __init__(self, spec: MultiSpec, pools: Mapping[str, Any]) -> None:
        """`pools` has a pool, not entered yet, for each name of the spec."""
        self.spec = spec
        self._pools = pools

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            self._opened = {name: entered.enter_context(pool) for name, pool in self._pools.items()}
            self._undo = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def submit(self, request: GradeRequest) -> Future[Grade]:
        """The formula's value; an error if one that the formula reads has none. Its `parts` are the graders' own."""
        futures = {name: pool.submit(request) for name, pool in self._opened.items()}
        whole: Future[Grade] = Future()
        lock, left = threading.Lock(), len(futures)

        def ended(_: Future[Grade]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            if not whole.set_running_or_notify_cancel():
                return
            try:
                whole.set_result(combined(self.spec, {name: future.result() for name, future in futures.items()}))
            except (CancelledError, Exception) as error:
                whole.set_exception(error)

        def cancelled(done: Future[Grade]) -> None:
            if done.cancelled():
                for future in futures.values():
                    future.cancel()

        whole.add_done_callback(cancelled)
        for future in futures.values():
            future.add_done_callback(ended)
        return whole

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order, when all are there."""
        return [future.result() for future in [self.submit(request) for request in requests]]


def combined(spec: MultiSpec, parts: Mapping[str, Grade]) -> Grade:
    """The grade that a spec's formula makes of its graders' grades."""
    tokens: dict[str, int] = {}
    for part in parts.values():
        for model, count in part.num_tokens.items():
            tokens[model] = tokens.get(model, 0) + count
    try:
        for name in sorted(formula.names(spec.calculate_output) & parts.keys()):
            if parts[name].reward is None:
                raise GradeFailure(parts[name].error_type or "other_error", f"{name}: {parts[name].error}")
        rewards = {name: part.reward for name, part in parts.items() if part.reward is not None}
        return Grade(formula.evaluate(spec.calculate_output, rewards), parts=parts, num_tokens=tokens)
    except GradeFailure as failure:
        return Grade(None, failure.error_type, str(failure), parts=parts, num_tokens=tokens)
