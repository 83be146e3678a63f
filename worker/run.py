"""One attempt of a job, in a process of its own: `python -m worker.run JOB ATTEMPT`.

SIGTERM has it finish the step, checkpoint and give the job back. `main` takes the training loop as an argument; this
module loads no torch until it is run.
"""

import errno
import fcntl
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from app import db, logs
from app.errors import LeaseLost
from app.jobs import service
from app.jobs.service import Lease
from app.settings import Settings, get_settings
from app.storage import get_store
from qerl_core.config import TrainConfig
from qerl_core.errors import BadData, QerlError
from qerl_core.observer import Observer
from worker.child import UNREPORTED
from worker.observer import JobObserver

logger = logging.getLogger(__name__)


class Train(Protocol):
    """`qerl_core.loop.train`, or a stand-in for it."""

    def __call__(self, config: TrainConfig, folder: Path, observer: Observer, *, cache: Path) -> bool:
        """Run or resume a job in `folder`. False: the observer stopped it early."""
        ...


class Stopped(BaseException):
    """SIGTERM came before there was anything to keep."""


def main(argv: Sequence[str], train: Train) -> int:
    """Run an attempt and report how it ended. Returns the exit status: 0 if it was reported, or is superseded."""
    logs.setup()
    job_id, attempt = argv
    lease, settings = Lease(job_id, int(attempt)), get_settings()
    with logs.bound(logs.job_id, job_id):
        try:
            db.patiently(_run(lease, train, settings), patience_s=settings.lease_timeout_s)
        except LeaseLost as error:
            logger.info("ending: %s", error)
        except db.AWAY:
            logger.exception("ending: the database is away")
            return UNREPORTED
    return 0


def _run(lease: Lease, train: Train, settings: Settings) -> Callable[..., None]:
    """Train. Returns what to write at the end; what is unexpected is raised, and read from the log by the worker."""
    try:
        with _folder(settings.scratch / lease.job_id) as folder:
            config = _config(lease, folder)
            observer = JobObserver(
                lease, num_steps=config.num_steps, folder=folder, patience_s=settings.lease_timeout_s,
                safeguards=config.safeguards,
            )  # fmt: skip
            signal.signal(signal.SIGTERM, partial(_stop, observer))
            done = train(config, folder / "run", observer, cache=settings.cache)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if not done:
                return partial(service.release, lease=lease, reason="it was asked to stop")
            if observer.published != config.num_steps:
                raise RuntimeError(f"the last checkpoint is step {observer.published}, not {config.num_steps}")
            return partial(service.succeed, lease=lease)
    except Stopped:
        return partial(service.release, lease=lease, reason="its worker shut down")
    except QerlError as error:
        return partial(service.fail, lease=lease, code=error.code, message=str(error))
    except Exception as error:
        if not is_disk_full(error):
            raise
        logger.exception("the disk is full")
        message = "The worker's disk is full. Make room on it and create the job again."
        return partial(service.fail, lease=lease, code="disk_full", message=message)


def _stop(observer: JobObserver, *received: Any) -> None:
    observer.stop()
    if observer.idle:
        raise Stopped


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """The job's scratch folder, once an earlier attempt's process, if one still runs, has left it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _config(lease: Lease, folder: Path) -> TrainConfig:
    """The job's config, its data copied from the store."""
    with db.transaction(read_only=True) as session:
        config = TrainConfig.model_validate(service.get(session, lease.job_id).config)
    (folder / "data").mkdir(exist_ok=True)
    paths = {"train_path": _fetch(config.data.train_path, folder / "data" / "train.jsonl")}
    if config.data.valid_path is not None:
        paths["valid_path"] = _fetch(config.data.valid_path, folder / "data" / "valid.jsonl")
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def _fetch(key: Path, target: Path) -> Path:
    try:
        get_store().fetch(str(key), target)
    except FileNotFoundError as error:
        raise BadData("a file of the job was deleted before it ran; upload it and create the job again") from error
    return target


def is_disk_full(error: BaseException) -> bool:
    """Whether this is what a full disk leads to, whichever library met it."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(chain):  # as safetensors says it
            return True
        chain = chain.__cause__ or chain.__context__
    return False


if __name__ == "__main__":
    from qerl_core.loop import train

    sys.exit(main(sys.argv[1:], train))
