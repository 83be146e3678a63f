"""The process of an attempt, and the guard that leaves nothing of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.guard import Guarded
from tests.live import gone, processes, wait_until
from worker import child

STRAYS = "(setsid sh -c 'setsid sleep 1001 & sleep 1002' &); (sleep 1003 &);"
ON_TERM = "trap 'echo asked; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
IGNORES_TERM = "trap '' TERM; echo ready; sleep 1000"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def start(log):
    """Start a shell script under a guard."""
    started = []

    def run(script: str) -> Guarded:
        with log.open("ab") as output:
            started.append(Guarded(("sh", "-c", script), output=output))
        return started[-1]

    yield run
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -TERM $$", -15), ("kill -SEGV $$", -11)],
)
def test_a_guard_ends_as_its_command_did(start, script, code):
    assert start(script).wait(10) == code


def test_a_command_that_is_not_there_says_so(log):
    with log.open("wb") as output:
        assert Guarded(("no-such-command",), output=output).wait(10) == 127
    assert log.read_text() == "no-such-command: No such file or directory\n"


def test_what_a_command_leaves_behind_ends_with_it(start, log):
    process = start(STRAYS + "echo $(cat /dev/stdin); sleep 0.3; exit 5")
    strays = wait_until(lambda: (found := processes(process.pid, "sleep 100")) and len(found) >= 3 and found)

    assert process.wait(10) == 5
    assert gone(strays)


def test_a_kill_ends_processes_in_other_sessions_too(start):
    process = start(STRAYS + "sleep 1004")
    started = wait_until(lambda: (found := processes(process.pid)) and len(found) >= 6 and found)

    assert process.kill() == -signal.SIGKILL
    assert gone(started)
    assert process.kill() == -signal.SIGKILL


def test_all_of_it_ends_when_its_parent_is_killed(log):
    script = f"""
import sys, time
from app.guard import Guarded
Guarded(("sh", "-c", {STRAYS + "sleep 1004"!r}), output=sys.stdout.buffer)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    started = wait_until(lambda: (found := processes(parent.pid)) and len(found) >= 7 and found)

    parent.kill()
    parent.wait()

    wait_until(lambda: gone(started), timeout_s=5)


def test_a_guard_that_is_killed_takes_its_command_along(start):
    process = start("exec sleep 1000")
    [command] = wait_until(lambda: processes(process.pid, "sleep"))

    os.kill(process.pid, signal.SIGKILL)

    wait_until(lambda: gone([command]), timeout_s=5)


def test_a_signal_is_handed_on_to_the_command_alone(start, log):
    process = start(f"(trap 'echo wrong' TERM; sleep 1000) & {ON_TERM}")
    wait_until(lambda: "ready" in log.read_text())

    process.terminate()

    assert process.wait(10) == 7
    assert log.read_text() == "ready\nasked\n"


def run(script, log, tick, *, grace_s=10.0):
    return child.run(("sh", "-c", script), log=log, tick=tick, tick_s=0.05, grace_s=grace_s)


def test_a_run_is_asked_to_stop_once_and_goes_on_ticking(log):
    ticks = []

    def tick() -> bool:
        ticks.append(time.monotonic())
        return "ready" in log.read_text()

    assert run(ON_TERM, log, tick) == 7
    assert log.read_text() == "ready\nasked\n"


def test_a_run_that_does_not_stop_in_its_grace_is_killed(log):
    assert run(IGNORES_TERM, log, lambda: "ready" in log.read_text(), grace_s=0.3) == -signal.SIGKILL


def test_what_a_tick_raises_kills_the_run_at_once(log):
    def tick() -> bool:
        if "ready" in log.read_text():
            raise LookupError("the lease is lost")
        return False

    before = processes(os.getpid())
    with pytest.raises(LookupError, match="the lease is lost"):
        run(IGNORES_TERM, log, tick, grace_s=1000)
    assert processes(os.getpid()) == before


def test_a_tail_has_the_last_lines_and_no_folders(log):
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/srv/qerl/worker/run.py", line 3, in main\n'
        "OSError: [Errno 2] No such file or directory: '/home/ada/.qerl/jobs/x/data.bin'\n"
        "see https://example.org/a/b and w/h = 1/2, a and/or b\n"
    )
    log.write_bytes(b"".join(b"line %d\n\n" % n for n in range(9000)) + b"\xff\0 odd\n" + traceback.encode())

    lines = child.tail(log).splitlines()

    assert len(lines) == child.TAIL_LINES
    assert lines[:2] == ["line 8985", "line 8986"]
    assert lines[-5:] == [
        "\ufffd odd",
        "Traceback (most recent call last):",
        '  File "run.py", line 3, in main',
        "OSError: [Errno 2] No such file or directory: 'data.bin'",
        "see https://example.org/a/b and w/h = 1/2, a and/or b",
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "was killed by SIGKILL (the kernel does so when memory is short) before it logged anything."),
        (-11, "was killed by SIGSEGV before it logged anything."),
        (1, "ended with exit status 1 before it logged anything."),
    ],
)
def test_an_obituary_says_how_a_run_died(log, code, said):
    log.touch()
    assert child.obituary(code, log) == f"The training process {said}"
