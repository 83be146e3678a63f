"""A process of which nothing survives: not what it started, not what left its group, not even if we die by kill -9.

Between us and a command stands a guard, which is this file run as a script. It starts the command and hands signals
on to it. When the command ends, or we do (the pipe from us closes, our process is gone), it kills everything that
descends from it: as a subreaper it inherits what its descendants leave behind, in whatever session. Linux; standard
library only and no site packages, so that a guard starts in a hundredth of a second and holds a few megabytes.
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 1.0
KILL_TIMEOUT_S = 30.0


class Guarded:
    """A running command whose processes all end with it, with `kill`, or with us."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes],
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._guard.pid
        """The guard's."""

    def wait(self, timeout_s: float) -> int | None:
        """The command's exit status, negative for a signal; None if it still runs after so long."""
        try:
            code = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._close()
        return code

    def terminate(self) -> None:
        """Ask the command to stop: SIGTERM, to itself alone."""
        self._guard.terminate()

    def kill(self) -> int:
        """End all of it at once; no error if it has ended. Returns the exit status."""
        self._close()
        try:
            return self._guard.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a process that not even SIGKILL ends soon, or a guard that was stopped
            with suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            return self._guard.wait()

    def _close(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """The processes that a process has started, and theirs, and so on."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows while it is read
        found.extend(children.get(pid, ()))
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the time to start
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123
                yield int(name), int(file.read().rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _start(command: Sequence[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # until there is somebody to hand them on to
    guard, pid = os.getpid(), os.fork()
    if pid:
        os.closerange(3, 1024)  # what was passed through to the command
        for number in HANDED_ON:
            signal.signal(number, lambda received, frame: os.kill(pid, received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        return pid
    try:
        die_with_parent()
        if os.getppid() == guard:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (*HANDED_ON, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
            os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reap(pid: int) -> int | None:
    """Collect every child that has ended; the status of `pid` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                status = ended[1]
    return status


def _kill_all() -> None:
    """End every descendant, and those that they start meanwhile."""
    deadline = time.monotonic() + KILL_TIMEOUT_S / 2
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        _reap(0)


def main(command: Sequence[str]) -> int:
    """Guard a command. Ends as it ended: with its status, or by its signal."""
    parent = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda received, frame: None)
    status = _reap(pid)
    while status is None and os.getppid() == parent:
        ready = select.select([0, wake], [], [], POLL_S)[0]
        if 0 in ready and not os.read(0, 4096):
            break
        if wake in ready:
            os.read(wake, 4096)
        status = _reap(pid)
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    _kill_all()
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core, if it was to
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
