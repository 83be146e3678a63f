"""The helper process behind `runner.GraderPool`: warm, it forks for each call, so a call costs milliseconds.

It reads framed JSON on stdin and writes framed JSON to the descriptor named on its command line: first the spec, then
requests {id, item, output_text}; each is answered {id, reward, error_type, error}, in any order. User code never runs
in this process, which outlives a call, but in a fork with limits, in a session of its own, that is killed at its
deadline with all that it started. A sandbox (namespaces, seccomp) can be put around this whole process.
"""

import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from qerl_core.graders.grade import Reply, Spec, compile_source, failure, math_check, python_call, reward, string_check

HEADER = struct.Struct("!I")
MAX_REPLY_BYTES = 64 << 10
MAX_MEMORY_BYTES = 2 << 30
MAX_FILE_BYTES = 16 << 20
MAX_OPEN_FILES = 64
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


@dataclass(slots=True)
class _Call:
    """A fork at work."""

    id: int
    pid: int
    deadline: float
    nonce: str
    reply: bytearray = field(default_factory=bytearray)


class Zygote:
    """Serves calls until stdin ends."""

    def __init__(self, spec: Spec, num_workers: int, reply_fd: int) -> None:
        self.spec = spec
        self.num_workers = num_workers
        self.reply_fd = reply_fd
        self.code: CodeType | Reply | None = None
        if spec["type"] == "python":
            self.code = compile_source(spec["source"])
        elif spec["type"] == "math":
            math_check({"reference": "1"}, {}, "$1$")  # imports and warms the parser once, for all forks
        self.waiting: deque[dict[str, Any]] = deque()
        self.calls: dict[int, _Call] = {}
        """By the descriptor on which the fork answers."""

    def serve(self, requests: "_Frames") -> None:
        """Until the requests end; what is still at work then is killed."""
        try:
            while not requests.ended:
                while self.waiting and len(self.calls) < self.num_workers:
                    self._start(self.waiting.popleft())
                self._wait(requests)
        finally:
            for fd in list(self.calls):
                self._finish(fd, failure("other_error", "the grader was shut down"), answer=False)

    def _start(self, request: dict[str, Any]) -> None:
        if self.spec["type"] == "string_check":  # no user code, and nothing in it can take long
            self._answer(request["id"], string_check(self.spec, request["item"], request["output_text"]))
            return
        if isinstance(self.code, dict):
            self._answer(request["id"], self.code)
            return
        read_fd, write_fd = os.pipe()
        nonce = secrets.token_hex(16)
        pid = os.fork()
        if pid == 0:
            self._child(request, write_fd, nonce)
        os.close(write_fd)
        self.calls[read_fd] = _Call(request["id"], pid, time.monotonic() + self.spec["timeout_s"], nonce)

    def _child(self, request: dict[str, Any], write_fd: int, nonce: str) -> None:
        try:
            os.setsid()
            _limit(self.spec["timeout_s"])
            _silence(keep=write_fd)
            os.environ.clear()
            if isinstance(self.code, CodeType):
                reply = python_call(self.code, request["item"], request["output_text"])
            else:
                reply = math_check(self.spec, request["item"], request["output_text"])
        except BaseException as error:  # the checker's own faults, memory included
            reply = failure("other_error", f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            os.write(write_fd, frame({**reply, "nonce": nonce}))
        os._exit(0)

    def _wait(self, requests: "_Frames") -> None:
        nearest = min((call.deadline for call in self.calls.values()), default=None)
        timeout = None if nearest is None else max(0.0, nearest - time.monotonic())
        ready, _, _ = select.select([requests.fd, *self.calls], [], [], timeout)
        if requests.fd in ready:
            self.waiting.extend(requests.read())
        for fd in ready:
            if fd in self.calls:
                self._read(fd)
        now = time.monotonic()
        for fd in [fd for fd, call in self.calls.items() if call.deadline <= now]:
            self._finish(fd, self._too_late())

    def _too_late(self) -> Reply:
        if self.spec["type"] == "math":  # an answer that cannot be checked in time is not the right one
            return reward(0.0)
        return failure("unresponsive_reward_error", f"grade took longer than {self.spec['timeout_s']} s")

    def _read(self, fd: int) -> None:
        call = self.calls[fd]
        part = os.read(fd, 1 << 16)
        call.reply += part
        if len(call.reply) > MAX_REPLY_BYTES:
            self._finish(fd, self._no_answer("its reply is too large"))
        elif not part:
            self._finish(fd, self._judge(call))

    def _judge(self, call: _Call) -> Reply:
        """The reply, if it is one whole message of the fork's own."""
        size = HEADER.unpack(call.reply[: HEADER.size])[0] if len(call.reply) >= HEADER.size else -1
        if size != len(call.reply) - HEADER.size:
            return self._no_answer("the process ended without an answer")
        try:
            reply = json.loads(call.reply[HEADER.size :])
        except ValueError:
            return self._no_answer("its reply is not JSON")
        if not isinstance(reply, dict) or reply.pop("nonce", None) != call.nonce:
            return self._no_answer("its reply is not from the grader")
        return reply

    def _no_answer(self, why: str) -> Reply:
        kind = "python_grader_runtime_error" if self.spec["type"] == "python" else "other_error"
        return failure(kind, why)

    def _finish(self, fd: int, reply: Reply, *, answer: bool = True) -> None:
        call = self.calls.pop(fd)
        os.close(fd)
        _kill_group(call.pid)
        self._kill_strays()
        if answer:
            self._answer(call.id, reply)

    def _kill_strays(self) -> None:
        """What left its session is our child by now, as the nearest reaper; none but the calls' forks may be."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        if not children.exists():
            return
        at_work = {call.pid for call in self.calls.values()}
        for pid in map(int, children.read_text().split()):
            if pid not in at_work:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _answer(self, id: int, reply: Reply) -> None:
        data = memoryview(frame({"id": id, **reply}))
        while data:
            data = data[os.write(self.reply_fd, data) :]


class _Frames:
    """Messages from a descriptor, as they arrive."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False
        self.buffer = bytearray()

    def read(self) -> list[dict[str, Any]]:
        """What has arrived by now; waits for some byte."""
        part = os.read(self.fd, 1 << 20)
        self.ended = not part
        self.buffer += part
        found = []
        while len(self.buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack(self.buffer[: HEADER.size])[0]
            if len(self.buffer) < end:
                break
            found.append(json.loads(self.buffer[HEADER.size : end]))
            del self.buffer[:end]
        return found


def _limit(timeout_s: float) -> None:
    limits = {
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_CPU: int(timeout_s) + 2,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _silence(*, keep: int) -> None:
    """Standard streams to nowhere, and every other descriptor closed: what user code prints is not its reply."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 12)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not have made its session yet
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _follow(parent: int) -> None:
    """End with the process that started this one, and adopt what leaves a call's session."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """`zygote REPLY_FD NUM_WORKERS PARENT_PID`."""
    reply_fd, num_workers, parent = map(int, sys.argv[1:4])
    _follow(parent)
    requests = _Frames(0)
    first: list[dict[str, Any]] = []
    while not first and not requests.ended:
        first = requests.read()
    if first:
        zygote = Zygote(first[0], num_workers, reply_fd)
        zygote.waiting.extend(first[1:])
        zygote.serve(requests)


if __name__ == "__main__":
    main()
