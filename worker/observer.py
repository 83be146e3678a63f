"""What leaves a run of the service: a step becomes a row, a checkpoint an archive in the store and a row."""

import gzip
import tarfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db
from app.jobs import service
from app.jobs.models import Checkpoint
from app.jobs.service import Artifact, Lease
from app.storage import file_sha256, get_store
from qerl_core.config import SafeguardsConfig
from qerl_core.observer import Metrics
from qerl_core.safeguards import Watch

T = TypeVar("T")

RECENT_STEPS = 20
"""The remaining time is told from the mean of so many steps."""


class JobObserver:
    """Writes under a lease: LeaseLost, out of any of its methods, means that the run has been superseded."""

    def __init__(
        self,
        lease: Lease,
        *,
        num_steps: int,
        folder: Path,
        patience_s: float,
        safeguards: SafeguardsConfig | None = None,
    ) -> None:
        self.lease = lease
        self.num_steps = num_steps
        self.folder = folder
        """For archives on their way to the store."""
        self.patience_s = patience_s
        """How long the database may be away."""
        self.published = -1
        """The last step whose checkpoint is in the store."""
        self.idle = True
        """No step since the start, so nothing is lost by stopping at once."""
        self._stop = False
        self._watch = safeguards and Watch(safeguards)
        self._metrics: Metrics = {}
        self._last_at: float | None = None
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)

    def stop(self) -> None:
        """Have the run checkpoint and end after its step."""
        self._stop = True

    def on_phase(self, phase: str) -> None:
        """Show the phase."""
        self._write(lambda session: service.enter_phase(session, self.lease, phase))

    def on_note(self, message: str) -> None:
        """Add an event."""
        self._write(lambda session: service.note(session, self.lease, message))

    def on_start(self, step: int) -> None:
        """Forget the steps that will come again."""
        self._write(lambda session: service.rewind(session, self.lease, step))
        if self._write(lambda session: _checkpoint_of(session, self.lease.job_id, step)):
            self.published = step
        if self._watch:
            for earlier, metrics in self._write(
                lambda session: service.metrics_until(session, self.lease.job_id, step)
            ):
                self._watch.take(earlier, metrics)
        self._last_at = time.monotonic()

    def on_step(self, step: int, metrics: Metrics) -> bool:
        """Add the step's row. True once `stop` was called, or when a safeguard has the job paused."""
        left = self._seconds_left(step)
        self._write(lambda session: service.record_step(session, self.lease, step, metrics, seconds_left=left))
        self._metrics, self.idle = metrics, False
        fault = self._watch.take(step, metrics) if self._watch and step < self.num_steps else None
        if fault is not None:
            self._write(lambda session: service.stop(session, self.lease, fault))
            self._watch = None  # said once
        return self._stop or fault is not None

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Publish the adapter, unless the run goes on from a checkpoint that was published when it was made."""
        if step == self.published:
            return
        archive = self.folder / f"step-{step:06d}.tar.gz"
        key = f"jobs/{self.lease.job_id}/attempts/{self.lease.attempt}/{archive.name}"
        try:
            pack(folder / "adapter", archive)
            artifact = Artifact(key, file_sha256(archive), archive.stat().st_size)
            get_store().put(key, archive)
        finally:
            archive.unlink(missing_ok=True)
        metrics = self._metrics
        self._write(lambda session: service.publish(session, self.lease, step, artifact, metrics))
        self.published = step

    def _seconds_left(self, step: int) -> float | None:
        now = time.monotonic()
        if self._last_at is not None and step > 0:  # 0 is an evaluation, which takes a time of its own
            self._times.append(now - self._last_at)
        self._last_at = now
        if not self._times:
            return None
        return (self.num_steps - step) * sum(self._times) / len(self._times)

    def _write(self, work: Callable[[Session], T]) -> T:
        return db.patiently(work, patience_s=self.patience_s)


def _checkpoint_of(session: Session, job_id: str, step: int) -> str | None:
    return session.scalar(select(Checkpoint.id).where(Checkpoint.job_id == job_id, Checkpoint.step == step))


def pack(folder: Path, archive: Path) -> None:
    """Write a folder's files as tar.gz under `adapter/`: the same files give the same bytes. Links are left out."""
    with (
        archive.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                info = tarfile.TarInfo(f"adapter/{path.relative_to(folder)}")
                info.size = path.stat().st_size  # owner, time and mode keep TarInfo's fixed defaults
                with path.open("rb") as source:
                    tar.addfile(info, source)
