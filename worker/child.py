"""The process of an attempt: nothing of it survives its end, a cancel or its worker, not even vLLM's engine."""

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.guard import Guarded

UNREPORTED = 75
"""The exit status of a run that ended while the database was away: EX_TEMPFAIL."""

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024
MAX_LINE = 500

_LOCAL_FOLDER = re.compile(r"(?<![\w:/.])(?:/[^\s/:\"'<>|]+)+/(?=[^\s/])")


def run(
    command: Sequence[str],
    *,
    log: Path,
    tick: Callable[[], bool],
    tick_s: float,
    grace_s: float,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command and call `tick` every `tick_s`. Returns the exit status, negative for a signal.

    Once `tick` returns True the command is asked to stop (SIGTERM), and killed if it has not after `grace_s`. What
    `tick` raises kills it at once.
    """
    with log.open("ab") as file:
        process = Guarded(command, output=file, env=env)
    try:
        deadline: float | None = None
        while (code := process.wait(tick_s)) is None:
            if tick() and deadline is None:
                process.terminate()
                deadline = time.monotonic() + grace_s
            if deadline is not None and time.monotonic() > deadline:
                break
        return process.kill() if code is None else code
    finally:
        process.kill()


def obituary(code: int, log: Path) -> str:
    """What to tell the user of a process that died without a word: how, and the last lines of its log."""
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (the kernel does so when memory is short)"
    else:
        how = f"ended with exit status {code}"
    last = tail(log)
    return f"The training process {how}" + (f"; its log ends with:\n{last}" if last else " before it logged anything.")


def tail(log: Path) -> str:
    """The last lines of a log, without the folders that paths in it name."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").replace("\0", "").splitlines()
    kept = [line[:MAX_LINE] for line in lines if line.strip()][-TAIL_LINES:]
    return _LOCAL_FOLDER.sub("", "\n".join(kept))
