"""Events are written in the transaction that moves the job: one is told if and only if it happened."""

import json

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.callers import ALL_OWNERS
from app.db import now
from app.ids import new_id
from app.jobs.models import Job
from app.webhooks.models import WebhookDelivery, WebhookEndpoint

JOB_EVENTS = {state: f"fine_tuning.job.{state}" for state in ("succeeded", "failed", "cancelled", "paused", "running")}
"""By the state that a job enters. The last two are ours."""


def record(session: Session, job_id: str, state: str) -> None:
    """Tell the endpoints of the job's owner that want to know of it."""
    event_type = JOB_EVENTS.get(state)
    if event_type is None:
        return
    owner = select(Job.owner).where(Job.id == job_id).scalar_subquery()
    query = select(WebhookEndpoint).where(WebhookEndpoint.owner == owner, WebhookEndpoint.disabled_at.is_(None))
    wanting = [row for row in session.scalars(query.execution_options(**{ALL_OWNERS: True})) if event_type in row.event_types]  # fmt: skip  # noqa: E501
    if not wanting:
        return
    event_id = new_id("evt_")
    body = event_body(event_id, event_type, job_id, session.scalars(select(now())).one())
    for endpoint in wanting:
        delivery = WebhookDelivery(
            id=new_id("whdlv_"), owner=endpoint.owner, endpoint_id=endpoint.id, event_id=event_id,
            event_type=event_type, body=body,
        )  # fmt: skip
        session.add(delivery)


def event_body(event_id: str, event_type: str, job_id: str, created_at: float) -> str:
    """OpenAI's event."""
    event = {"id": event_id, "object": "event", "created_at": int(created_at), "type": event_type}
    return json.dumps({**event, "data": {"id": job_id}}, separators=(",", ":"))
