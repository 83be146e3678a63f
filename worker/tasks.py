"""The queue's side of a run: take the job, hold its lease while a process of its own trains, judge how that ended.

Never loads torch: CUDA does not survive Celery's fork.
"""

import errno
import logging
import mmap
import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import select

from app import broker, db, logs
from app.errors import LeaseLost
from app.jobs import service
from app.jobs.models import Job
from app.jobs.service import Lease
from app.jobs.state import ENDED, JobState
from app.settings import Settings, get_settings
from worker import child

logger = logging.getLogger(__name__)

# Made before the pool is forked, so that its processes see what the main process learns. A byte of shared memory and
# no lock: a process that is killed while it looks leaves nothing locked.
_stopping = mmap.mmap(-1, 1)


def stop() -> None:
    """Have every run of this worker checkpoint and give its job back."""
    _stopping[0] = 1


def stopping() -> bool:
    """Whether this worker shuts down."""
    return _stopping[0] == 1


def train(rung_for: str) -> None:
    """Run an attempt of the job whose turn it is to its end.

    The message's own job is no more than the reason to look: one that comes late or twice finds another job, or none.
    """
    if stopping():  # the sweep rings again
        return
    worker = f"{socket.gethostname()}:{os.getpid()}"
    with db.transaction() as session:
        lease = service.claim_next(session, worker)
    if lease is None:
        logger.info("nothing to do: rung for %s, and no job waits", rung_for)
        return
    with logs.bound(logs.job_id, lease.job_id):
        settings = get_settings()
        try:
            db.patiently(_attempt(lease, settings), patience_s=settings.lease_timeout_s)
        except LeaseLost as error:  # the run has reported its end itself, or was superseded
            logger.info("attempt %d is over: %s", lease.attempt, error)
        _tidy(lease.job_id, settings)


def _attempt(lease: Lease, settings: Settings) -> Callable[..., None]:
    """Run the attempt. Returns what to write, unless the run has said itself how it ended."""
    folder = settings.scratch / lease.job_id
    log, temporary = folder / f"attempt-{lease.attempt}.log", folder / "tmp"
    heart = Heart(lease, settings)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        code = child.run(
            (*settings.run_command, lease.job_id, str(lease.attempt)),
            log=log,
            tick=heart.beat,
            tick_s=settings.heartbeat_s,
            grace_s=settings.stop_grace_s,
            # Threads that spin while they wait slow everything down on cores that are shared. What a killed run leaves
            # in its temporary folder goes with the job's.
            env={"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **os.environ, "TMPDIR": str(temporary)},
        )
    except OSError as error:
        name = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "worker_crashed"
        return partial(service.fail, lease=lease, code=name, message=f"The run could not start: {error.strerror}.")
    if heart.stopped or stopping() or code == child.UNREPORTED:
        return partial(service.release, lease=lease, reason="its worker shut down" if stopping() else "no database")
    return partial(service.fail, lease=lease, code="worker_crashed", message=child.obituary(code, log))


class Heart:
    """Keeps a lease."""

    def __init__(self, lease: Lease, settings: Settings) -> None:
        self.stopped = False
        """The run was asked to stop, for the job is to be paused or has used up its limits."""
        self._lease = lease
        self._timeout_s = settings.lease_timeout_s
        self._beat_at = time.monotonic()

    def beat(self) -> bool:
        """Tell whether the run is to stop. LeaseLost ends the run, as does a database away so long."""
        began = time.monotonic()
        try:
            with db.transaction() as session:
                self.stopped |= service.heartbeat(session, self._lease)
            self._beat_at = began
        except db.AWAY as error:
            if began - self._beat_at > self._timeout_s:
                raise LeaseLost(f"no database for {began - self._beat_at:.0f} s, so the lease has run out") from error
            logger.warning("no heartbeat, the database is away: %s", error.orig)
        return self.stopped or stopping()


def _tidy(job_id: str, settings: Settings) -> None:
    """Ring for a job that waits again; drop the checkpoints of one that has ended: what it made is in the store."""
    with db.transaction(read_only=True) as session:
        state = session.scalar(select(Job.state).where(Job.id == job_id))
    if state is None:  # deleted meanwhile
        shutil.rmtree(settings.scratch / job_id, ignore_errors=True)
    elif state == JobState.QUEUED:
        broker.ring(job_id)
    elif state in ENDED:
        for name in ("run", "data", "tmp"):
            shutil.rmtree(settings.scratch / job_id / name, ignore_errors=True)
