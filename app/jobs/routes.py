"""`/v1/fine_tuning/jobs` and the checkpoints that jobs leave."""

import hashlib
import logging
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Header, Query, Request
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from app import broker, logs
from app.db import transaction
from app.downloads import attachment
from app.errors import NotFound
from app.jobs import service
from app.jobs.creation import Repeat, create, fingerprint, retry
from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.jobs.objects import (
    CHECKPOINT_MARK,
    CheckpointObject,
    EventObject,
    JobObject,
    MetricsObject,
    checkpoint_object,
    event_object,
    job_object,
    metrics_object,
)
from app.jobs.schemas import JobRequest, ResumeRequest
from app.jobs.search import with_metadata
from app.jobs.state import JobState
from app.jobs.turns import Turns
from app.paging import ListObject, PagingDep, page
from app.storage import get_store

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"])

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]
RetryCount = Annotated[int, Header(alias="x-stainless-retry-count", ge=0)]


@router.post("/jobs")
def create_job(
    request: JobRequest,
    response: Response,
    after: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = 0,
) -> JobObject:
    """Queue a reinforcement fine-tuning job. The same create again is answered with the job that it made."""
    repeat = Repeat(fingerprint(request), idempotency_key, retried=retry_count > 0)
    return _created(*create(request, repeat), response, after)


def _created(job: Job, is_new: bool, response: Response, after: BackgroundTasks) -> JobObject:
    if is_new:
        with logs.bound(logs.job_id, job.id):
            logger.info("created")
        after.add_task(broker.ring, job.id)
    else:
        response.headers["idempotent-replayed"] = "true"
    with transaction(read_only=True) as session:
        return job_object(job, Turns(session).of(job))


@router.get("/jobs")
def list_jobs(request: Request, paging: PagingDep) -> ListObject[JobObject]:
    """A page of jobs, newest first; `metadata[key]=value` keeps those with the pair, `metadata=null` of none."""
    query = with_metadata(select(Job), request.query_params)
    with transaction(read_only=True) as session:
        turns = Turns(session)
        return page(session, query, Job.id, paging, shown=lambda job: job_object(job, turns.of(job)))


@router.get("/jobs/{job_id}")
def retrieve_job(job_id: str) -> JobObject:
    """A job."""
    with transaction(read_only=True) as session:
        return _shown(session, service.get(session, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(job_id: str) -> JobObject:
    """End a job that has not ended. A running one stops within seconds; its checkpoints stay."""
    with transaction() as session:
        return _shown(session, service.cancel(session, job_id))


@router.post("/jobs/{job_id}/pause")
def pause_job(job_id: str) -> JobObject:
    """Have a job wait until it is resumed. A running one ends its step, and checkpoints: its phase is `pausing`."""
    with transaction() as session:
        return _shown(session, service.pause(session, job_id))


@router.post("/jobs/{job_id}/resume")
def resume_job(job_id: str, after: BackgroundTasks, request: ResumeRequest | None = None) -> JobObject:
    """Queue a paused job again; it goes on from its last checkpoint."""
    limits = None if request is None or request.limits is None else request.limits.stored()
    with transaction() as session:
        job = service.resume(session, job_id, limits)
        if job.state == JobState.QUEUED:
            after.add_task(broker.ring, job.id)
        return _shown(session, job)


@router.post("/jobs/{job_id}/retry")
def retry_job(
    job_id: str,
    response: Response,
    after: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = 0,
) -> JobObject:
    """Queue a job that failed or was cancelled once more: a new job, from the first step, with the same seed."""
    repeat = Repeat(hashlib.sha256(f"retry {job_id}".encode()).hexdigest(), idempotency_key, retried=retry_count > 0)
    return _created(*retry(job_id, repeat), response, after)


class JobDeleted(BaseModel):
    """The answer to a delete."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    deleted: Literal[True] = True


@router.delete("/jobs/{job_id}")
def delete_job(job_id: str) -> JobDeleted:
    """Delete a job that has ended, with its events, metrics, checkpoints and the model that it made."""
    with transaction() as session:
        keys = service.remove(session, job_id)
    for key in keys:
        get_store().delete(key)
    return JobDeleted(id=job_id)


def _shown(session: Session, job: Job) -> JobObject:
    return job_object(job, Turns(session).of(job))


@router.get("/jobs/{job_id}/events")
def list_events(job_id: str, paging: PagingDep) -> ListObject[EventObject]:
    """A page of a job's log, newest first."""
    with transaction(read_only=True) as session:
        service.get(session, job_id)
        query = select(Event).where(Event.job_id == job_id)
        return page(session, query, Event.id, paging, shown=event_object)


@router.get("/jobs/{job_id}/checkpoints")
def list_checkpoints(job_id: str, paging: PagingDep) -> ListObject[CheckpointObject]:
    """A page of a job's checkpoints, newest first."""
    with transaction(read_only=True) as session:
        job = service.get(session, job_id)
        query = select(Checkpoint).where(Checkpoint.job_id == job_id)
        return page(session, query, Checkpoint.id, paging, shown=partial(checkpoint_object, job=job))


@router.get("/jobs/{job_id}/metrics")
def list_metrics(
    job_id: str,
    since_step: Annotated[
        int, Query(ge=-1, description="Only later steps; the evaluation of the base is step 0.")
    ] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> ListObject[MetricsObject]:
    """The metrics of a job's steps, oldest first. The last step of a page is the next one's `since_step`."""
    with transaction(read_only=True) as session:
        service.get(session, job_id)
        query = select(StepMetrics).where(StepMetrics.job_id == job_id, StepMetrics.step > since_step)
        rows = session.scalars(query.order_by(StepMetrics.step).limit(limit + 1)).all()
        return ListObject(data=[metrics_object(row) for row in rows[:limit]], has_more=len(rows) > limit)


IfNoneMatch = Annotated[str | None, Header()]


@router.get("/jobs/{job_id}/adapter", response_class=Response)
def download_job_adapter(job_id: str, if_none_match: IfNoneMatch = None) -> Response:
    """The adapter of a job's newest checkpoint (tar.gz, PEFT layout); of one that succeeded, the final adapter."""
    with transaction(read_only=True) as session:
        job = service.get(session, job_id)
        query = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc()).limit(1)
        checkpoint = session.scalar(query)
    if checkpoint is None:
        raise NotFound(
            f"The job {job_id} is {job.state} and has published no adapter{'' if job.finished_at else ' yet'}.",
            param="fine_tuning_job_id",
            code="adapter_not_found",
        )
    return _archive(checkpoint, if_none_match)


@router.get("/checkpoints/{checkpoint:path}/adapter", response_class=Response)
def download_checkpoint_adapter(checkpoint: str, if_none_match: IfNoneMatch = None) -> Response:
    """The adapter of a checkpoint, by its id or by its model name `ft:...:ckpt-step-N` (tar.gz, PEFT layout)."""
    with transaction(read_only=True) as session:
        found = _checkpoint(session, checkpoint)
    if found is None:
        raise NotFound(f"The checkpoint {checkpoint!r} does not exist.", param="fine_tuned_model_checkpoint")
    return _archive(found, if_none_match)


def _checkpoint(session: Session, name: str) -> Checkpoint | None:
    model, mark, step = name.rpartition(CHECKPOINT_MARK)
    if not mark:
        return session.get(Checkpoint, name)
    if not (step.isascii() and step.isdigit() and len(step) < 10):
        return None
    query = select(Checkpoint).join(Job, Job.id == Checkpoint.job_id)
    return session.scalar(query.where(Job.fine_tuned_model == model, Checkpoint.step == int(step)))


def _archive(checkpoint: Checkpoint, if_none_match: str | None) -> Response:
    return attachment(
        checkpoint.key, f"{checkpoint.job_id}-step-{checkpoint.step}.tar.gz", num_bytes=checkpoint.num_bytes,
        sha256=checkpoint.sha256, media_type="application/gzip", if_none_match=if_none_match,
    )  # fmt: skip
