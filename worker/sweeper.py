"""The sweep, on a thread of the worker's main process: its pool is busy for hours, and a beat could be away."""

import logging
import os
import threading

from app import broker
from app.settings import get_settings

logger = logging.getLogger(__name__)

_stopped = threading.Event()
_sweeping = threading.Lock()
_thread: threading.Thread | None = None

# A pool process that is forked while a sweep is at work would inherit its locks, and nobody to release them.
os.register_at_fork(before=_sweeping.acquire, after_in_parent=_sweeping.release, after_in_child=_sweeping.release)


def start() -> None:
    """Sweep now and every `sweep_s`, until `stop`. A second call does nothing."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="sweep", daemon=True)
        _thread.start()


def stop() -> None:
    """Sweep no more."""
    _stopped.set()


def _run() -> None:
    while not _stopped.is_set():
        with _sweeping:
            try:
                broker.sweep()
            except Exception:  # the database is away: the next sweep finds what this one would have
                logger.exception("a sweep failed")
        _stopped.wait(get_settings().sweep_s)
