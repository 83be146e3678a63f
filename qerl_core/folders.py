"""Folders that are whole or not there: filled beside their place, flushed to disk, renamed into it. Torch-free."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the block ends, with all its bytes on disk, or vanishes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def lone_maker(out: Path) -> Iterator[bool]:
    """Whether `out` is to be made. Of two processes that ask at once one makes it and the other waits.

    What a killed maker left behind is thrown away.
    """
    if out.is_dir():  # it got this name when it was whole
        yield False
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for abandoned in out.parent.glob(f".{out.name}.*.partial"):
            shutil.rmtree(abandoned, ignore_errors=True)
        yield not out.is_dir()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
