"""Grading, outside this process: a pool whose zygote forks a process for each call.

No grader runs in the API's or the trainer's process. What comes back is checked like any input.
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
from contextlib import ExitStack
from dataclasses import dataclass
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
    """Runs one grader over completions, side by side. To be entered; leaving it leaves no process."""

    def __init__(self, spec: GraderSpec, *, num_workers: int | None = None) -> None:
        """`num_workers` calls run at a time; by default as many as this process may use cores."""
        self.spec = spec
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def __enter__(self) -> Self:
        self._zygote = _Zygote(self.spec, self.num_workers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order; each has the grader's time limit for itself. Never raises for a grader.

        A zygote that dies is started again once, with the requests that have no grade yet; after that they are
        errors. Threads take turns.
        """
        grades: list[Grade | None] = [None] * len(requests)
        death = ""
        with self._lock:
            for _ in range(2):
                waiting = deque(i for i, grade in enumerate(grades) if grade is None)
                if not waiting:
                    break
                if self._zygote is None or not self._zygote.is_alive():
                    self._stop()
                    self._zygote = _Zygote(self.spec, self.num_workers)
                try:
                    self._zygote.grade(requests, waiting, grades)
                except _Gone as gone:
                    death = str(gone)
                    self._stop()
                except BaseException:
                    self._stop()  # replies to this batch must not meet the next one
                    raise
        lost = Grade(None, "other_error", f"the grader's process died twice: {death}")
        return [grade or lost for grade in grades]

    def _stop(self) -> None:
        if self._zygote is not None:
            self._zygote.stop()
            self._zygote = None


def zygote_command(channel: int, folder: Path) -> list[str]:
    """The command of a zygote, which reads and writes `channel` and may write to `folder` only.

    Whatever confines graders goes around it: both are handed down, and it needs nothing else but the interpreter.
    """
    options = ["-P", "-s", "-B"]  # no current folder and no user's packages on the path, no .pyc files
    return [sys.executable, *options, "-m", "qerl_core.graders.zygote", str(channel), str(folder)]


class _Gone(Exception):
    """The zygote died, hangs, or talks nonsense."""


@dataclass(frozen=True, slots=True)
class _Sent:
    nonce: str
    deadline: float


class _Zygote:
    def __init__(self, spec: GraderSpec, num_workers: int) -> None:
        self._window = PIPELINE if spec.type == "string_check" else num_workers
        self._patience_s = 2 * getattr(spec, "timeout_s", 0.0) + GRACE_S  # `math` may try twice
        self._ready_by: float | None = time.monotonic() + START_S
        self._poll = select.poll()
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

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def grade(self, requests: Sequence[GradeRequest], waiting: deque[int], grades: list[Grade | None]) -> None:
        """Fill in the grades of the requests whose places are `waiting`. _Gone if the zygote is."""
        while self._ready_by is not None:
            for message in self._exchange(self._ready_by):
                if message != {"ready": True}:
                    raise _Gone("it said something else than that it is ready")
                self._ready_by = None
        running: dict[int, _Sent] = {}
        while waiting or running:
            while waiting and len(running) < self._window:
                place = waiting.popleft()
                nonce = secrets.token_hex(8)
                try:
                    body = pack({"item": requests[place].item, "output_text": requests[place].output_text})
                    if len(body) > MAX_REQUEST_BYTES:
                        raise ValueError(f"{len(body)} bytes are too many")
                except (ValueError, TypeError, RecursionError) as error:
                    grades[place] = Grade(None, "other_error", f"the row cannot be handed to the grader: {error}")
                    continue
                self._outgoing += pack({"id": place, "nonce": nonce}) + body
                running[place] = _Sent(nonce, time.monotonic() + self._patience_s)
            if not running:
                break
            for message in self._exchange(next(iter(running.values())).deadline):
                sent = running.pop(message.get("id", -1), None)
                if sent is None or message.get("nonce") != sent.nonce:
                    raise _Gone("it answered what it was not asked")
                grades[message["id"]] = _grade_of(message)

    def _exchange(self, deadline: float) -> list[dict[str, Any]]:
        """Wait for either direction to move; returns what came in. _Gone at the deadline or the end."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        patience_s = deadline - time.monotonic()
        if patience_s <= 0 or not (ready := self._poll.poll(math.ceil(patience_s * 1000))):
            raise _Gone("it does not answer")
        try:
            if ready[0][1] & select.POLLOUT:
                del self._outgoing[: self._socket.send(self._outgoing)]
            if not ready[0][1] & ~select.POLLOUT:
                return []
            data = self._socket.recv(1 << 18)
            if not data:
                raise _Gone(f"it ended with status {self._process.wait(STOP_S)}")
            return [unpack(body) for body in self._frames.feed(data)]
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise _Gone(str(error)) from error

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
