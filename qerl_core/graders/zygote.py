"""The helper process of a grader pool: `python -m qerl_core.graders.zygote CHANNEL FOLDER`.

It imports what graders need once and forks a process for each call, so that a call costs milliseconds, starts from
the same state as every other, and can be killed alone. It runs no user code itself. CHANNEL is the descriptor of a
socket: in come the spec, and then for each call a head {id, nonce} and a body {item, output_text}; out go
{ready: true}, and for each call {id, nonce, reward} or {id, nonce, error_type, error}. When the channel ends, it ends.

A call runs in a session of its own, with limits, in an empty folder under FOLDER, with an empty environment, and all
descriptors closed but one, for its reply. At its reply, its end or its deadline everything that it started is killed:
its process group, and, since the zygote adopts orphans (PR_SET_CHILD_SUBREAPER), what has left the group too.

A completion can hang math-verify, and then it is wrong; but so can a reference, and then no completion is. So a call
of `math` that is late is made again with a harmless completion: only if that is late too is it an error.

The nonce keeps stray writes from being taken for a reply. It is no secret from the user's code, which shares a
process with it: that code decides the reward anyway, and keeps model output out of its own process if it runs it.

Standard library only, and little of it: this must start fast.
"""

import ctypes
import gc
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from qerl_core.graders import math as math_grader
from qerl_core.graders import python, string_check
from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.wire import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, Frames, pack, unpack

MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
OPEN_FILES = 256
MAX_ERROR_CHARS = 10_000

REPLY_FD = 3
MAX_FD = 1 << 16
KEPT_ENVIRONMENT = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

Message = Mapping[str, Any]


class Call:
    """A fork at work."""

    __slots__ = ("body", "deadline", "folder", "frames", "head", "is_probe", "pid", "pidfd", "pipe")

    def __init__(self, head: Message, body: bytes, *, is_probe: bool, folder: str) -> None:
        self.head = head
        self.body = body
        self.is_probe = is_probe
        self.folder = folder
        self.frames = Frames(max_bytes=MAX_REPLY_BYTES)
        self.deadline = math.inf
        self.pid = self.pidfd = self.pipe = -1


class Zygote:
    """Answers calls until its channel ends."""

    def __init__(self, spec: Message, *, channel: int, waker: int, folder: str) -> None:
        """`waker` becomes readable when this process is asked to end."""
        self.spec = spec
        self.channel = channel
        self.waker = waker
        self.folder = folder
        self.pid = os.getpid()
        self.calls: dict[int, Call] = {}
        """Each call twice: under the descriptor of its pipe and that of its process."""
        self.poll = select.poll()
        for fd in (channel, waker):
            self.poll.register(fd, select.POLLIN)
        self.incoming = Frames(max_bytes=MAX_REQUEST_BYTES)
        self.head: Message | None = None

    def serve(self) -> None:
        """Run until the other end of the channel is closed. Nothing outlives this, nor does the folder."""
        try:
            while self._turn():
                pass
        finally:
            for call in set(self.calls.values()):
                self._kill(call)
            kill_strays(spare=set())
            remove(self.folder)

    def _turn(self) -> bool:
        # New calls come last: they may reuse the descriptors of calls that end in this turn.
        ready = sorted((fd for fd, _ in self.poll.poll(self._patience_ms())), key=lambda fd: fd == self.channel)
        for fd in ready:
            call = self.calls.get(fd)
            if fd == self.waker:
                return False
            if fd == self.channel:
                data = os.read(self.channel, 1 << 18)
                if not data:
                    return False
                for body in self.incoming.feed(data):
                    self._take(body)
            elif call is not None:
                self._hear(call, ended=fd == call.pidfd)
        now = time.monotonic()
        for call in {call for call in self.calls.values() if call.deadline <= now}:
            self._overrun(call)
        return True

    def _patience_ms(self) -> float | None:
        if not self.calls:
            return None
        nearest = min(call.deadline for call in self.calls.values())
        return math.ceil(max(0.0, nearest - time.monotonic()) * 1000)

    def _take(self, body: bytes) -> None:
        if self.head is None:
            self.head = unpack(body)
            return
        head, self.head = self.head, None
        if self.spec["type"] == "string_check":  # trusted code that ends soon
            self._answer(head, grade(self.spec, body))
        else:
            self._start(head, body)

    def _start(self, head: Message, body: bytes, *, is_probe: bool = False) -> None:
        call = Call(head, body, is_probe=is_probe, folder=f"{self.folder}/{head['id']}")
        try:
            self._fork(call)
        except OSError as error:
            self._answer(head, failed("other_error", f"a process could not be started: {error.strerror}"))
            return
        call.deadline = time.monotonic() + self.spec["timeout_s"]
        for fd in (call.pipe, call.pidfd):
            self.calls[fd] = call
            self.poll.register(fd, select.POLLIN)

    def _fork(self, call: Call) -> None:
        with ExitStack() as undo:
            os.mkdir(call.folder, 0o700)  # noqa: PTH102 - pathlib would double the time to start
            undo.callback(remove, call.folder)
            call.pipe, reply_fd = os.pipe()
            undo.callback(os.close, call.pipe)
            try:
                call.pid = os.fork()
                if call.pid == 0:
                    self._run(call, reply_fd)
            finally:
                os.close(reply_fd)
            undo.callback(kill_strays, spare={other.pid for other in self.calls.values()})
            os.set_blocking(call.pipe, False)
            call.pidfd = os.pidfd_open(call.pid)
            undo.pop_all()

    def _run(self, call: Call, reply_fd: int) -> NoReturn:
        """What the fork does: no way leads out of here but the end of the process."""
        try:
            isolate(call.folder, reply_fd, zygote=self.pid, timeout_s=self.spec["timeout_s"])
            data = pack({**grade(self.spec, call.body), "nonce": call.head["nonce"]})
            while data:
                data = data[os.write(REPLY_FD, data) :]
        finally:
            os._exit(0)

    def _hear(self, call: Call, *, ended: bool) -> None:
        try:
            data = os.read(call.pipe, 1 << 16)
        except BlockingIOError:  # something that it started still holds the other end
            data = b""
        nonce = call.head["nonce"]
        try:
            reply = next((checked(unpack(body), nonce=nonce) for body in call.frames.feed(data)), None)
        except ValueError:
            reply = failed(self._fault(), "something else than grade() wrote to its reply channel")
        if reply is not None or (ended and not data):
            self._end(call, reply)
        elif not data and call.pipe in self.calls:  # it closed its end; its process tells when it ends
            self.poll.unregister(call.pipe)
            del self.calls[call.pipe]

    def _overrun(self, call: Call) -> None:
        if self.spec["type"] == "math" and not call.is_probe:
            self._clear(call)
            body = json.dumps({**json.loads(call.body), "output_text": math_grader.PROBE}).encode()
            self._start(call.head, body, is_probe=True)
        else:
            self._end(call, self._too_late())

    def _end(self, call: Call, reply: Message | None) -> None:
        status = self._clear(call)
        if reply is None:
            reply = self._obituary(os.waitstatus_to_exitcode(status))
        elif call.is_probe and "reward" in reply:
            reply = {"reward": 0.0}
        self._answer(call.head, reply)

    def _obituary(self, code: int) -> Message:
        if code == -signal.SIGXCPU:
            return self._too_late()
        how = f"with exit status {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
        return failed(self._fault(), f"the process ended {how} before it gave an answer")

    def _too_late(self) -> Message:
        return failed("unresponsive_reward_error", f"no answer within {self.spec['timeout_s']:g} s")

    def _clear(self, call: Call) -> int:
        """End a call's processes, and forget it. Returns how it ended."""
        status = self._kill(call)
        kill_strays(spare={other.pid for other in self.calls.values()})
        remove(call.folder)
        return status

    def _kill(self, call: Call) -> int:
        for kill in (os.kill, os.killpg):  # it may not have made its group yet
            with suppress(ProcessLookupError):
                kill(call.pid, signal.SIGKILL)
        _, status = os.waitpid(call.pid, 0)
        for fd in (call.pipe, call.pidfd):
            if self.calls.pop(fd, None) is not None:
                self.poll.unregister(fd)
            os.close(fd)
        return status

    def _fault(self) -> str:
        return "python_grader_runtime_error" if self.spec["type"] == "python" else "other_error"

    def _answer(self, head: Message, reply: Message) -> None:
        data = pack({"id": head["id"], "nonce": head["nonce"], **reply})
        while data:
            data = data[os.write(self.channel, data) :]


def grade(spec: Message, body: bytes) -> Message:
    """The reply to a call, made in this process."""
    graders = {"string_check": string_check.grade, "math": math_grader.grade, "python": python.grade}
    try:
        return {"reward": graders[spec["type"]](spec, **json.loads(body))}
    except GradeFailure as failure:
        return failed(failure.error_type, str(failure))
    except BaseException as error:
        kind = "python_grader_runtime_error" if spec["type"] == "python" else "other_error"
        return failed(kind, f"{type(error).__name__}: {error}")


def failed(error_type: str, error: str) -> Message:
    """A reply without a reward."""
    return {"error_type": error_type[:64], "error": error[:MAX_ERROR_CHARS]}


def checked(message: Message, *, nonce: str) -> Message:
    """A fork's reply with what belongs in it and nothing else. ValueError if it is none."""
    if message.get("nonce") != nonce:
        raise ValueError("a wrong nonce")
    if "reward" not in message:
        return failed(str(message.get("error_type")), str(message.get("error")))
    reward = message["reward"]
    if type(reward) is not float or not math.isfinite(reward):
        raise ValueError("not a reward")
    return {"reward": reward}


def isolate(folder: str, reply_fd: int, *, zygote: int, timeout_s: float) -> None:
    """Make a fork a call's process: its own session, nothing inherited but where to reply, limits. OSError."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        os._exit(1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for stream in (1, 2):
        os.dup2(0, stream)  # the null device
    os.dup2(reply_fd, REPLY_FD, inheritable=False)
    os.closerange(REPLY_FD + 1, MAX_FD)
    os.chdir(folder)
    os.umask(0o077)
    cpu_s = math.ceil(timeout_s) + 1
    for limit, soft in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        hard = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(limit, (min(soft, hard), hard))


def kill_strays(*, spare: set[int]) -> None:
    """End what calls have left behind: as a subreaper, this process is the parent of every orphan of theirs."""
    deadline = time.monotonic() + 2
    while (strays := children() - spare) and time.monotonic() < deadline:
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in strays:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> set[int]:
    """The processes whose parent is this one."""
    pid = os.getpid()
    try:
        with open(f"/proc/self/task/{pid}/children") as file:  # noqa: PTH123
            return set(map(int, file.read().split()))
    except FileNotFoundError:
        return children_by_scan()


def children_by_scan() -> set[int]:
    """The same on a kernel without CONFIG_PROC_CHILDREN."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(name))
    return found


def remove(folder: str) -> None:
    """Delete a folder, and what calls wrote there as far as that can be deleted."""
    try:
        os.rmdir(folder)  # noqa: PTH106
    except OSError:
        import shutil

        with suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)


def prctl(option: int, value: int) -> None:
    """Set a property of this process. OSError."""
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """See the module."""
    channel, folder = int(sys.argv[1]), sys.argv[2]
    # A handler that raised could do so while calls are being killed, since the channel ends at the same time.
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda received, frame: None)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    frames = Frames(max_bytes=MAX_REQUEST_BYTES)
    bodies: list[bytes] = []
    while not bodies:
        # One byte at a time costs nothing here, and leaves the calls that follow to the loop.
        data = os.read(channel, 1)
        if not data:
            return
        bodies = list(frames.feed(data))
    spec = unpack(bodies[0])
    if spec["type"] == "math":
        math_grader.warm()
    elif spec["type"] == "python":
        python.preload(spec["source"])
    for name in set(os.environ) - set(KEPT_ENVIRONMENT):
        del os.environ[name]
    zygote = Zygote(spec, channel=channel, waker=waker, folder=folder)
    gc.collect()
    gc.freeze()
    with suppress(BrokenPipeError, ConnectionResetError):
        os.write(channel, pack({"ready": True}))
        zygote.serve()


if __name__ == "__main__":
    main()
