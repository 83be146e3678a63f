"""Every write to a job, for the API and the worker. Check and change are one statement, so of a race one wins.

A run's writes take its `Lease` and raise `LeaseLost` once the job is not running under that attempt any more.
"""

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, case, delete, or_, select, update
from sqlalchemy.orm import Session

from app.db import now
from app.errors import BadRequest, JobConflict, LeaseLost, NotFound
from app.ids import new_id
from app.jobs import turns
from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.jobs.state import ENDED, SOURCES, JobState
from app.settings import get_settings
from app.webhooks import outbox


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one attempt to write to its job."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """An archive that is in the store."""

    key: str
    sha256: str
    num_bytes: int


def submit(session: Session, job: Job) -> Job:
    """Add a queued job. Its message is sent after the commit (`broker.ring`), or else by the sweep."""
    job.id = job.id or new_id("ftjob-")
    job.state = JobState.QUEUED
    name = (job.model, get_settings().organization, job.suffix or "", job.id[-8:])
    job.fine_tuned_model = ":".join(("ft", *name))
    session.add(job)
    session.flush()
    log(session, job.id, "Created fine-tuning job: " + job.id)
    return job


def get(session: Session, job_id: str) -> Job:
    """The job; NotFound if there is none."""
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"No fine-tuning job has the id {job_id!r}.", param="fine_tuning_job_id")
    return job


def log(
    session: Session,
    job_id: str,
    message: str,
    *,
    level: str = "info",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Add an event; one with a step is a metrics event."""
    kind = "message" if step is None else "metrics"
    event = Event(
        id=new_id("ftevent-"), job_id=job_id, level=level, type=kind, message=_storable(message), step=step,
        data=data or {},
    )  # fmt: skip
    session.add(event)


def _storable(text: str) -> str:
    """The same without what UTF-8 or PostgreSQL cannot hold: messages quote the logs of runs, and users' code."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def enter(session: Session, job_id: str, state: JobState, *where: ColumnElement[bool], **changes: Any) -> None:
    """Move a job to `state` if that may follow the state it is in; else JobConflict."""
    allowed = (Job.id == job_id, Job.state.in_(SOURCES[state]), *where)
    if state in ENDED:
        changes = {"finished_at": now(), "phase": None, "estimated_finish": None, **changes}
    move = update(Job).where(*allowed).values(state=state, **changes).returning(Job.id)
    if session.scalar(move) is None:
        current = get(session, job_id).state
        raise JobConflict(f"Job {job_id} is {current} and cannot become {state}.", param="fine_tuning_job_id")
    outbox.record(session, job_id, state)


def claim(session: Session, job_id: str, worker: str) -> Lease:
    """Take a queued job; JobConflict if it is not. Whoever held it before can write no more."""
    changes = {"attempt": Job.attempt + 1, "worker": worker, "heartbeat_at": now(), "phase": "preparing"}
    changes |= {"stop_as": None, "stop_reason": None}
    enter(session, job_id, JobState.RUNNING, **changes)
    session.execute(update(Job).where(Job.id == job_id, Job.started_at.is_(None)).values(started_at=now()))
    job = session.get_one(Job, job_id, populate_existing=True)
    log(session, job_id, f"Attempt {job.attempt} started.", data={"attempt": job.attempt})
    return Lease(job_id, job.attempt)


def claim_next(session: Session, worker: str) -> Lease | None:
    """Take the job whose turn it is; None if none is queued."""
    while (job_id := turns.first(session)) is not None:
        try:
            return claim(session, job_id, worker)
        except JobConflict:  # another worker was first
            session.expire_all()
    return None


def _held(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (Job.id == lease.job_id, Job.attempt == lease.attempt, Job.state == JobState.RUNNING)


def _write(session: Session, lease: Lease, **values: Any) -> None:
    if session.scalar(update(Job).where(*_held(lease)).values(**values).returning(Job.id)) is None:
        raise _superseded(lease)


def _superseded(lease: Lease) -> LeaseLost:
    return LeaseLost(f"attempt {lease.attempt} does not hold job {lease.job_id} any more")


def _alive() -> dict[str, Any]:
    """What a sign of life changes: the time since the one before counts as held."""
    return {"heartbeat_at": now(), "gpu_seconds": Job.gpu_seconds + now() - Job.heartbeat_at}


def heartbeat(session: Session, lease: Lease) -> bool:
    """Keep the lease. True: the run is to checkpoint and be released, since it is paused or has used up its limits.

    LeaseLost tells that the job was cancelled, ended, or given to another worker.
    """
    beat = update(Job).where(*_held(lease)).values(**_alive())
    columns = (Job.stop_as, Job.limits, Job.gpu_seconds, now() - Job.wall_from)
    row = session.execute(beat.returning(*columns)).one_or_none()
    if row is None:
        raise _superseded(lease)
    stop_as, limits, gpu_seconds, wall_seconds = row
    if stop_as is not None:
        return True
    for name, used in (("max_gpu_seconds", gpu_seconds), ("max_wall_seconds", wall_seconds)):
        if limits.get(name) is not None and used >= limits[name]:
            reason = f"limits.{name} {limits[name]} is used up"
            _write(session, lease, stop_as=_ON_LIMIT[limits["on_limit"]], stop_reason=reason, phase="pausing")
            log(session, lease.job_id, f"The run stops at its next checkpoint: {reason}.", level="warn")
            return True
    return False


_ON_LIMIT = {"pause": JobState.PAUSED, "fail": JobState.FAILED}


def enter_phase(session: Session, lease: Lease, phase: str) -> None:
    """Say what the run is at: preparing, baseline, training, evaluating, publishing. One that pauses says so."""
    _write(session, lease, phase=case((Job.stop_as.is_(None), phase), else_=Job.phase))


def note(session: Session, lease: Lease, message: str) -> None:
    """Add an event of the run's own."""
    _write(session, lease, **_alive())
    log(session, lease.job_id, message)


def stop(session: Session, lease: Lease, reason: str) -> None:
    """Have the run that holds the lease pause at its next checkpoint, unless something else has asked it to stop."""
    asked = (Job.stop_as.is_(None), *_held(lease))
    values = {"stop_as": JobState.PAUSED, "stop_reason": reason, "phase": "pausing"}
    if session.scalar(update(Job).where(*asked).values(**values).returning(Job.id)) is not None:
        log(session, lease.job_id, f"The run pauses at its next checkpoint: {reason}.", level="warn")


def metrics_until(session: Session, job_id: str, step: int) -> list[tuple[int, dict[str, float]]]:
    """The metrics of a job's steps up to one, in their order."""
    query = select(StepMetrics.step, StepMetrics.values).where(StepMetrics.job_id == job_id, StepMetrics.step <= step)
    return [(row.step, row.values) for row in session.execute(query.order_by(StepMetrics.step))]


def rewind(session: Session, lease: Lease, step: int) -> None:
    """Start from the checkpoint of `step`: what an earlier attempt reported beyond it will be reported again."""
    _write(session, lease, step=max(step, 0))
    later = (StepMetrics.job_id == lease.job_id, StepMetrics.step > step)
    session.execute(delete(StepMetrics).where(*later))
    session.execute(delete(Event).where(Event.job_id == lease.job_id, Event.step > step))
    rows = session.scalars(select(StepMetrics.values).where(StepMetrics.job_id == lease.job_id))
    _write(session, lease, trained_tokens=sum(int(values.get("tokens/trained", 0)) for values in rows))


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Without what JSON has no number for."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def record_step(
    session: Session, lease: Lease, step: int, values: dict[str, float], *, seconds_left: float | None = None
) -> None:
    """Add the metrics of a step and move the job's progress. A step that is there already is left alone."""
    values = _finite(values)
    _write(session, lease, **_alive())
    if session.get(StepMetrics, (lease.job_id, step)):
        return
    changes: dict[str, Any] = {
        "step": step,
        "trained_tokens": Job.trained_tokens + int(values.get("tokens/trained", 0)),
    }
    if seconds_left is not None:
        changes["estimated_finish"] = now() + seconds_left
    _write(session, lease, **changes)
    session.add(StepMetrics(job_id=lease.job_id, step=step, attempt=lease.attempt, values=values))
    reward = values.get("reward/mean")
    text = f"Step {step}" + (f": train_reward_mean={reward:.4f}" if reward is not None else "")
    named = {"train_reward_mean": reward, "valid_reward_mean": values.get("eval/reward_mean")}
    data = {"step": step, **{name: value for name, value in named.items() if value is not None}, **values}
    log(session, lease.job_id, text, step=step, data=data)


def publish(session: Session, lease: Lease, step: int, artifact: Artifact, metrics: dict[str, float]) -> Checkpoint:
    """Add the checkpoint of a step whose archive is in the store. The same step again replaces the row's archive."""
    _write(session, lease, **_alive())
    session.execute(delete(Checkpoint).where(Checkpoint.job_id == lease.job_id, Checkpoint.step == step))
    checkpoint = Checkpoint(
        id=new_id("ftckpt_"), job_id=lease.job_id, step=step, attempt=lease.attempt, key=artifact.key,
        sha256=artifact.sha256, num_bytes=artifact.num_bytes, metrics=_finite(metrics),
    )  # fmt: skip
    session.add(checkpoint)
    log(session, lease.job_id, f"Checkpoint created at step {step}.", data={"checkpoint": checkpoint.id})
    return checkpoint


def succeed(session: Session, lease: Lease) -> None:
    """End a run that reached its last step and published it."""
    _end(session, lease, JobState.SUCCEEDED)
    log(session, lease.job_id, "The job has successfully completed.")


def fail(session: Session, lease: Lease, code: str, message: str, *, param: str | None = None) -> None:
    """End a run with the reason."""
    _end(session, lease, JobState.FAILED, error_code=code, error_message=_storable(message), error_param=param)
    log(session, lease.job_id, f"The job failed: {message}", level="error", data={"code": code})


def release(session: Session, lease: Lease, reason: str) -> None:
    """Give a job back, at its last checkpoint: to the queue, or to whoever wanted it stopped. No loss is counted."""
    query = select(Job.stop_as, Job.stop_reason).where(*_held(lease)).with_for_update()
    stop = session.execute(query).one_or_none()
    if stop is None:
        raise _superseded(lease)
    if stop.stop_as == JobState.FAILED:
        fail(session, lease, "limit_reached", f"{stop.stop_reason}. Its checkpoints stay; give a new job more.")
    elif stop.stop_as == JobState.PAUSED:
        _end(session, lease, JobState.PAUSED, stop_as=None, worker=None, phase=None, estimated_finish=None)
        log(session, lease.job_id, f"The job is paused: {stop.stop_reason}.")
    else:
        _end(session, lease, JobState.QUEUED, rung_at=None, worker=None, phase=None)
        log(session, lease.job_id, f"Attempt {lease.attempt} stopped ({reason}); the job waits for a worker.")


def _end(session: Session, lease: Lease, state: JobState, **changes: Any) -> None:
    held_for = {"gpu_seconds": Job.gpu_seconds + now() - Job.heartbeat_at}
    try:
        enter(session, lease.job_id, state, *_held(lease), **held_for, **changes)
    except (JobConflict, NotFound) as error:  # ended otherwise, or deleted
        raise LeaseLost(error.message) from error


def cancel(session: Session, job_id: str) -> Job:
    """End a job that has not ended. Its run, if any, learns it from its next heartbeat."""
    enter(session, job_id, JobState.CANCELLED)
    log(session, job_id, "The job was cancelled.")
    return session.get_one(Job, job_id, populate_existing=True)


def pause(session: Session, job_id: str) -> Job:
    """Have a job wait until it is resumed. A run ends its step and checkpoints first: phase `pausing` until then."""
    reason = "asked for by its user"
    running = (Job.id == job_id, Job.state == JobState.RUNNING)
    stop = {"stop_as": JobState.PAUSED, "stop_reason": reason, "phase": "pausing"}
    if session.scalar(update(Job).where(*running).values(**stop).returning(Job.id)) is not None:
        log(session, job_id, "The job will be paused after this step, at a checkpoint.")
    else:
        enter(session, job_id, JobState.PAUSED, stop_reason=reason)
        log(session, job_id, f"The job is paused: {reason}.")
    return session.get_one(Job, job_id, populate_existing=True)


def resume(session: Session, job_id: str, limits: dict[str, Any] | None = None) -> Job:
    """Queue a paused job again, or take back a pause that its run has not come to. `limits` replace those it had.

    BadRequest if it has used up its GPU-seconds already.
    """
    job = get(session, job_id)
    wanted = job.limits if limits is None else limits
    allowed = wanted.get("max_gpu_seconds")
    if allowed is not None and job.gpu_seconds >= allowed:
        raise BadRequest(
            f"The job has used {job.gpu_seconds:.0f} of its {allowed} GPU-seconds: give limits.max_gpu_seconds above.",
            param="limits.max_gpu_seconds",
        )
    changes = {"stop_as": None, "stop_reason": None, "limits": wanted, "wall_from": now()}
    pausing = (Job.id == job_id, Job.state == JobState.RUNNING, Job.stop_as == JobState.PAUSED)
    taken_back = update(Job).where(*pausing).values(**changes, phase="training").returning(Job.id)
    if session.scalar(taken_back) is None:
        enter(session, job_id, JobState.QUEUED, Job.state == JobState.PAUSED, **changes, rung_at=None)
    log(session, job_id, "The job was resumed.")
    return session.get_one(Job, job_id, populate_existing=True)


def remove(session: Session, job_id: str) -> list[str]:
    """Delete a job that has ended, and all that hangs on it. Returns the keys that may go once this is committed."""
    job = get(session, job_id)
    keys = list(session.scalars(select(Checkpoint.key).where(Checkpoint.job_id == job_id)))
    ended = (Job.id == job_id, Job.state.in_(ENDED))
    if session.scalar(delete(Job).where(*ended).returning(Job.id)) is None:
        raise JobConflict(f"Job {job_id} is {job.state}: cancel it, and then delete it.", param="fine_tuning_job_id")
    return keys


def requeue_lost(session: Session, *, lease_timeout_s: float, max_attempts: int) -> list[str]:
    """Queue the jobs whose worker went silent again, or fail those that it happened to too often. Returns their ids."""
    silent = (Job.state == JobState.RUNNING, Job.heartbeat_at < now() - lease_timeout_s)
    lost = session.scalars(select(Job).where(*silent).with_for_update(skip_locked=True)).all()
    for job in lost:
        lease, worker, losses = Lease(job.id, job.attempt), job.worker, job.losses + 1
        try:
            _write(session, lease, losses=losses)
            if losses >= max_attempts:
                fail(session, lease, "worker_lost", f"Its worker was lost {losses} times, the last one {worker}.")
            else:
                log(session, job.id, f"Worker {worker} went silent.", level="warn")
                release(session, lease, "its worker was lost")
        except LeaseLost:  # another sweep, or the job's own end, was first
            continue
    return [job.id for job in lost]


def unrung(session: Session, *, older_than_s: float | None) -> list[str]:
    """The queued jobs whose message was never sent or, unless None, so long ago that it may be lost; oldest first."""
    due: ColumnElement[bool] = Job.rung_at.is_(None)
    if older_than_s is not None:
        due = or_(due, Job.rung_at < now() - older_than_s)
    return list(session.scalars(select(Job.id).where(Job.state == JobState.QUEUED, due).order_by(Job.created_at)))


def rung(session: Session, job_id: str) -> None:
    """Note that a job's message was sent."""
    session.execute(update(Job).where(Job.id == job_id).values(rung_at=now()))
