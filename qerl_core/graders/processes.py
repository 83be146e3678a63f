"""Graders of ours that may take long over a text: worker processes, of which one that is late is killed.

No code of a user's runs in them, so a worker grades many completions; a pattern or a text can hang it, no more.
"""

import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import qerl_core
from qerl_core.graders.runner import GradeRequest
from qerl_core.graders.spec import FormatSpec, ReasoningGymSpec, TextSimilaritySpec
from qerl_core.graders.wire import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, Frames, pack, unpack
from qerl_core.types import Grade

START_S = 120.0
"""So long may a worker import what its grader needs."""
MAX_WORKERS = 4


class ProcessPool:
    """Runs one grader over completions, side by side. To be entered; leaving it leaves no process and no thread."""

    def __init__(
        self, spec: TextSimilaritySpec | FormatSpec | ReasoningGymSpec, *, num_workers: int | None = None
    ) -> None:
        self.spec = spec
        self.num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle = threading.local()
        self._open = False

    def __enter__(self) -> Self:
        # A worker ends with the thread that started it; the executor's live as long as the pool.
        self._executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="qerl-graders")
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open = False
            workers = list(self._workers)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        self._executor.shutdown()
        for worker in workers:
            worker.close()

    def submit(self, request: GradeRequest) -> Future[Grade]:
        """The grade to come: of a grader that fails too. Leaving the pool cancels what has not begun."""
        if not self._open:
            raise ValueError("the grader pool is not open")
        return self._executor.submit(self._grade, request)

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order, when all are there."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def _grade(self, request: GradeRequest) -> Grade:
        try:
            body = pack({"item": request.item, "output_text": request.output_text})
            if len(body) > MAX_REQUEST_BYTES:
                raise ValueError(f"{len(body)} bytes are too many")
        except (ValueError, TypeError, RecursionError) as error:
            return Grade(None, "other_error", f"the row cannot be handed to the grader: {error}")
        death = ""
        for _ in range(2):
            try:
                worker = getattr(self._idle, "worker", None) or self._start()
                self._idle.worker = None
                reply = worker.ask(body, timeout_s=self.spec.timeout_s)
            except _Late:
                self._drop(worker)
                return Grade(None, "unresponsive_reward_error", f"no answer within {self.spec.timeout_s:g} s")
            except (_Gone, OSError) as gone:
                if not self._open:
                    break
                death = str(gone)
                continue
            self._idle.worker = worker
            return _grade_of(reply)
        return Grade(None, "other_error", f"the grader's process died twice: {death}" if death else "it was stopped")

    def _start(self) -> "_Worker":
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
            is_open = self._open
        try:
            if not is_open:
                raise _Gone("the pool is closed")
            worker.ask(pack(self.spec.model_dump(mode="json")), timeout_s=START_S)
        except _Late:
            self._drop(worker)
            raise _Gone("it does not start") from None
        except (_Gone, OSError):
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: "_Worker") -> None:
        worker.kill()
        worker.close()
        with self._lock:
            self._workers.discard(worker)


class _Late(Exception):
    """There was no answer in time."""


class _Gone(Exception):
    """The worker died or talks nonsense."""


class _Worker:
    def __init__(self) -> None:
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", "-m", "qerl_core.graders.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PYTHONPATH": str(Path(qerl_core.__file__).parents[1]), "PYTHONHASHSEED": "0", **one},
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._frames = Frames(max_bytes=MAX_REPLY_BYTES)
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)

    def ask(self, body: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send a message and wait for its answer. _Late or _Gone; then this worker is of no use any more."""
        deadline = time.monotonic() + timeout_s
        view = memoryview(body)
        while view:
            view = view[self._stdin.write(view) or 0 :]
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(math.ceil(left * 1000)):
                raise _Late
            data = os.read(self._stdout.fileno(), 1 << 16)
            if not data:
                raise _Gone(f"it ended with status {self._process.wait()}")
            try:
                for reply in self._frames.feed(data):
                    return unpack(reply)
            except ValueError as error:
                raise _Gone(str(error)) from error

    def kill(self) -> None:
        """End it. From any thread."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Reap it; it has been killed."""
        self._process.wait()
        for stream in (self._stdin, self._stdout):
            with suppress(OSError):
                stream.close()


def _grade_of(reply: dict[str, Any]) -> Grade:
    reward = reply.get("reward")
    if isinstance(reward, float) and math.isfinite(reward):
        return Grade(reward)
    return Grade(None, _plain(reply.get("error_type")), _plain(reply.get("error")))


def _plain(text: object) -> str:
    """Text that UTF-8 and PostgreSQL can hold."""
    return str(text).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
