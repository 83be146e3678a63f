"""`/v1/queue`: which jobs wait, and where the caller's own stand."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from sqlalchemy import func, select

from app.callers import ALL_OWNERS
from app.db import transaction
from app.jobs import turns
from app.jobs.models import Job
from app.jobs.state import JobState

router = APIRouter(prefix="/v1", tags=["operations"])


class QueuedJob(BaseModel):
    """A job that waits for a worker."""

    id: str
    position: int
    priority: int
    created_at: int


class QueueObject(BaseModel):
    """The queue as the caller sees it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["queue"] = "queue"
    num_queued: int
    """Everyone's."""
    num_running: int
    """Everyone's."""
    data: list[QueuedJob]
    """The caller's own, the next first; an admin sees all."""
    has_more: bool


@router.get("/queue")
def read_queue(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> QueueObject:
    """How many jobs wait and run, and where the caller's own stand."""
    with transaction(read_only=True) as session:
        positions = {job_id: place for place, job_id in enumerate(turns.order(session), start=1)}
        running = select(func.count()).select_from(Job).where(Job.state == JobState.RUNNING)
        num_running = session.execute(running.execution_options(**{ALL_OWNERS: True})).scalar_one()
        queued = select(Job.id, Job.priority, Job.created_at).where(Job.state == JobState.QUEUED)
        data = [
            QueuedJob(id=row.id, position=positions[row.id], priority=row.priority, created_at=int(row.created_at))
            for row in session.execute(queued)
            if row.id in positions  # queued since the order was read
        ]
    data.sort(key=lambda job: job.position)
    return QueueObject(
        num_queued=len(positions), num_running=num_running, data=data[:limit], has_more=len(data) > limit
    )
