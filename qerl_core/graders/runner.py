"""Grading, outside this process and beside its work: a pool whose zygote forks a process for each call.

No grader runs in the API's or the trainer's process: a thread of the pool's hands requests over and takes grades, and
sleeps in between. What comes back is checked like any input.
"""

import math
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import qerl_core
from qerl_core.graders.spec import GraderSpec
from qerl_core.graders.wire import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, Frames, pack, unpack
from qerl_core.types import Grade, Item

START_S = 120.0
"""So long may a zygote import what its grader needs."""
GRACE_S = 30.0
"""So long after a call's own time limit, which the zygote enforces, the zygote itself counts as hung."""
STOP_S = 5.0
PIPELINE = 64
"""Calls on their way to a zygote that answers them itself, without a fork."""


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A completion to grade, and the row that it answers."""

    item: Item
    output_text: str


class GraderPool:
    """Runs one grader over completions, side by side. To be entered; leaving it leaves no process and no thread."""

    def __init__(self, spec: GraderSpec, *, num_workers: int | None = None) -> None:
        """`num_workers` calls run at a time; by default as many as this process may use cores."""
        self.spec = spec
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._waiting: deque[_Call] = deque()
        self._zygote: _Zygote | None = None
        self._open = False

    def __enter__(self) -> Self:
        self._bell = _Bell()
        self._zygote = _Zygote(self.spec, self.num_workers, self._bell)
        self._open = True
        # A zygote ends with the thread that started it, so this one lives as long as the pool.
        self._thread = threading.Thread(target=self._serve, name="qerl-graders", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._bell.ring()
        self._thread.join()
        for call in self._take_calls():
            call.future.cancel()
        self._bell.close()

    def submit(self, request: GradeRequest) -> Future[Grade]:
        """The grade to come: of a grader that fails too, and each request has the grader's time limit for itself.

        Requests start in order, as workers get free. A zygote that dies is started again with those that have no
        grade yet; a request that sees a second one die is an error. Leaving the pool cancels what is left.
        """
        if not self._open:
            raise ValueError("the grader pool is not open")
        call = _Call(request)
        self._waiting.append(call)
        self._bell.ring()
        return call.future

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order, when all are there. See `submit`."""
        futures = [self.submit(request) for request in requests]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _serve(self) -> None:
        while True:
            self._bell.hush()  # before the look at what is wanted: whatever comes after it rings again
            if not self._open:
                return
            try:
                self._turn()
            except _Gone as gone:
                self._bury(str(gone))
            except Exception as error:  # a process that cannot be started, or a mistake of ours
                for call in self._take_calls():
                    call.fail(error)

    def _turn(self) -> None:
        """Hand over what there is room for, then sleep until something comes in from either side."""
        if self._zygote is None:
            if not self._waiting:
                self._bell.wait()
                return
            self._zygote = _Zygote(self.spec, self.num_workers, self._bell)
        while self._waiting and self._zygote.has_room():
            self._zygote.send(self._waiting[0])
            self._waiting.popleft()
        self._zygote.exchange()

    def _bury(self, death: str) -> None:
        for call in self._take_calls():
            call.deaths += 1
            if call.deaths == 2:
                call.give(Grade(None, "other_error", f"the grader's process died twice: {death}"))
            else:
                self._waiting.append(call)

    def _take_calls(self) -> list["_Call"]:
        """Those that have no grade yet, in order. They are nobody's now, and there is no zygote any more."""
        calls: list[_Call] = []
        if self._zygote is not None:
            calls += self._zygote.calls.values()
            with suppress(OSError):  # a folder that cannot be deleted is no reason to lose grades
                self._zygote.stop()
            self._zygote = None
        calls += [self._waiting.popleft() for _ in range(len(self._waiting))]
        return calls


def zygote_command(channel: int, folder: Path) -> list[str]:
    """The command of a zygote, which reads and writes `channel` and may write to `folder` only.

    Whatever confines graders goes around it: both are handed down, and it needs nothing else but the interpreter.
    """
    options = ["-P", "-s", "-B"]  # no current folder and no user's packages on the path, no .pyc files
    return [sys.executable, *options, "-m", "qerl_core.graders.zygote", str(channel), str(folder)]


class _Gone(Exception):
    """The zygote died, hangs, or talks nonsense."""


@dataclass(slots=True, eq=False)
class _Call:
    request: GradeRequest
    future: Future[Grade] = field(default_factory=Future)
    nonce: str = ""
    deadline: float = math.inf
    deaths: int = 0
    """Of zygotes that should have graded it."""

    def give(self, grade: Grade) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(grade)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Bell:
    """Wakes a thread that polls it, from any other."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def wait(self) -> None:
        self._poll.poll()

    def close(self) -> None:
        os.close(self._fd)


class _Zygote:
    def __init__(self, spec: GraderSpec, num_workers: int, bell: _Bell) -> None:
        """`bell` ends a wait."""
        self.calls: dict[int, _Call] = {}
        """On their way; the first has been so for the longest."""
        self._numbers = count()
        self._window = PIPELINE if spec.type == "string_check" else num_workers
        self._patience_s = 2 * getattr(spec, "timeout_s", 0.0) + GRACE_S  # `math` may try twice
        self._ready_by: float | None = time.monotonic() + START_S
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)
        self._frames = Frames(max_bytes=MAX_REPLY_BYTES)
        self._outgoing = bytearray(pack(spec.model_dump(mode="json")))
        with ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="qerl-grader-")))
            self._socket, theirs = socket.socketpair()
            undo.enter_context(self._socket)
            with theirs:
                self._process = subprocess.Popen(
                    zygote_command(theirs.fileno(), self._folder),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    cwd=self._folder,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._socket.setblocking(False)
            self._undo = undo.pop_all()

    def has_room(self) -> bool:
        """Whether one more call may be sent now."""
        return self._ready_by is None and len(self.calls) < self._window

    def send(self, call: _Call) -> None:
        """Hand a call over, unless it was cancelled. What cannot be handed over gets its error here."""
        if call.future.cancelled():
            return
        try:
            body = pack({"item": call.request.item, "output_text": call.request.output_text})
            if len(body) > MAX_REQUEST_BYTES:
                raise ValueError(f"{len(body)} bytes are too many")
        except (ValueError, TypeError, RecursionError) as error:
            call.give(Grade(None, "other_error", f"the row cannot be handed to the grader: {error}"))
            return
        number = next(self._numbers)
        call.nonce, call.deadline = secrets.token_hex(8), time.monotonic() + self._patience_s
        self._outgoing += pack({"id": number, "nonce": call.nonce}) + body
        self.calls[number] = call

    def exchange(self) -> None:
        """Wait for either direction to move, or the bell; give out the grades that came. _Gone if the zygote is."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        ready = dict(self._poll.poll(self._patience_ms()))
        if not ready:
            raise _Gone("it does not answer")
        for message in self._received(ready.get(self._socket.fileno(), 0)):
            if self._ready_by is None:
                self._answered(message)
            elif message == {"ready": True}:
                self._ready_by = None
            else:
                raise _Gone("it said something else than that it is ready")

    def _patience_ms(self) -> int | None:
        deadline = self._ready_by
        if deadline is None:
            deadline = next((call.deadline for call in self.calls.values()), None)
        return None if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)

    def _received(self, events: int) -> list[dict[str, Any]]:
        try:
            if events & select.POLLOUT:
                del self._outgoing[: self._socket.send(self._outgoing)]
            if not events & ~select.POLLOUT:
                return []
            data = self._socket.recv(1 << 18)
            if not data:
                raise _Gone(f"it ended with status {self._process.wait(STOP_S)}")
            return [unpack(body) for body in self._frames.feed(data)]
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise _Gone(str(error)) from error

    def _answered(self, message: dict[str, Any]) -> None:
        number = message.get("id", -1)
        call = self.calls.get(number)
        if call is None or message.get("nonce") != call.nonce:
            raise _Gone("it answered what it was not asked")
        del self.calls[number]
        call.give(_grade_of(message))

    def stop(self) -> None:
        """End the process and what it started."""
        with self._undo:
            self._socket.close()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _environment() -> dict[str, str]:
    """What the zygote starts with. Equal hash seeds make a grader that walks a set give the same reward twice."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PYTHONPATH": str(Path(qerl_core.__file__).parents[1]), "PYTHONHASHSEED": "0", **one}


def _grade_of(message: dict[str, Any]) -> Grade:
    reward = message.get("reward")
    if isinstance(reward, float) and math.isfinite(reward):
        return Grade(reward)
    return Grade(None, _plain(message.get("error_type")), _plain(message.get("error")))


def _plain(text: object) -> str:
    """Text that UTF-8 and PostgreSQL can hold."""
    return str(text).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
