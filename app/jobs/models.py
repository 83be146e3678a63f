"""Rows of jobs, and of what a run leaves behind: events, metrics, checkpoints."""

from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.callers import Owned
from app.db import Base, now
from app.jobs.state import JobState

_STATES = ", ".join(f"'{state}'" for state in JobState)


class Job(Owned, Base):
    """A fine-tuning job. Its state is changed by `service.enter` alone."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(f"state IN ({_STATES})", name="jobs_state"),
        UniqueConstraint("owner", "idempotency_key", name="jobs_idempotency_key_of_owner_key"),
        Index("jobs_by_state", "state", "created_at"),
        Index("jobs_by_fingerprint", "fingerprint", "created_at"),
        Index("jobs_by_turn", "state", "priority", "owner", "id"),
        Index("jobs_by_owner_start", "owner", "started_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(insert_default=now())
    state: Mapped[str] = mapped_column(String(16), default=JobState.QUEUED)
    model: Mapped[str] = mapped_column(String(256))
    training_file: Mapped[str] = mapped_column(String(64))
    validation_file: Mapped[str | None] = mapped_column(String(64))
    suffix: Mapped[str | None] = mapped_column(String(64))
    fine_tuned_model: Mapped[str] = mapped_column(String(512), unique=True)
    """The name that its adapter will have: `ft:<model>:<organization>:<suffix>:<the id's end>`."""
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    """What the client sent, with resolved values: method, hyperparameters, metadata, warnings."""
    config: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The `TrainConfig`; its data paths are keys of the store."""
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    """The client's name for this create: the same again is answered with this job."""
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    """sha256 of the create's body."""
    retried: Mapped[bool] = mapped_column(default=False)
    """The create said that it repeats one that the client had no answer to."""

    retried_from: Mapped[str | None] = mapped_column(String(64))
    """The job that this one does again."""
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    """Higher ones come first (`turns.py`)."""
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict, server_default="{}")
    """What it may take at most: the request's `limits`."""
    stop_as: Mapped[str | None] = mapped_column(String(16))
    """Set while a run is to checkpoint and end: paused or failed."""
    stop_reason: Mapped[str | None] = mapped_column(Text)
    """Why it is to, or was paused."""
    gpu_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """How long attempts have held a GPU."""
    wall_from: Mapped[float] = mapped_column(insert_default=now(), server_default="0")
    """What `limits.max_wall_seconds` counts from: its create, or its last resume."""

    attempt: Mapped[int] = mapped_column(default=0)
    """Claims so far; the fencing token of every write of a run."""
    losses: Mapped[int] = mapped_column(default=0)
    """Attempts that ended because their worker went silent."""
    worker: Mapped[str | None] = mapped_column(String(256))
    """Who holds the lease."""
    rung_at: Mapped[float | None]
    """When its message was last sent; None until one was. The row is its own outbox."""
    started_at: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    finished_at: Mapped[float | None]

    phase: Mapped[str | None] = mapped_column(String(32))
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int]
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    estimated_finish: Mapped[float | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
    error_param: Mapped[str | None] = mapped_column(String(128))


class Event(Base):
    """A line of a job's log for its user, or the metrics of a step."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_job", "job_id", "id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float] = mapped_column(insert_default=now())
    level: Mapped[str] = mapped_column(String(8), default="info")
    type: Mapped[str] = mapped_column(String(16), default="message")
    message: Mapped[str] = mapped_column(Text)
    step: Mapped[int | None]
    """Set on metrics."""
    data: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class StepMetrics(Base):
    """The metrics of one step, once, whichever attempt made it."""

    __tablename__ = "step_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    created_at: Mapped[float] = mapped_column(insert_default=now())
    values: Mapped[dict[str, float]] = mapped_column(JSON)


class Checkpoint(Base):
    """A published adapter."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index("checkpoints_by_job", "job_id", "step", unique=True),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float] = mapped_column(insert_default=now())
    step: Mapped[int]
    attempt: Mapped[int]
    key: Mapped[str] = mapped_column(String(512))
    """Where the store has the archive (tar.gz)."""
    sha256: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[dict[str, float]] = mapped_column(JSON)
