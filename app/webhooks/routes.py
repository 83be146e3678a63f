"""`/v1/webhook_endpoints`: as OpenAI's SDK calls it (`client.webhooks`), and the log of deliveries."""

import base64
import secrets
from typing import get_args

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db import now, transaction
from app.errors import BadRequest, NotFound
from app.ids import new_id
from app.paging import ListObject, PagingDep, page
from app.webhooks import delivery, outbox
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.schemas import (
    DeliveryObject,
    EndpointDeleted,
    EndpointObject,
    EndpointRequest,
    EndpointUpdate,
    EventType,
    EventTypeList,
    NewEndpointObject,
    RotateRequest,
    TestRequest,
    TestResult,
    delivery_object,
    endpoint_object,
    new_endpoint_object,
)

router = APIRouter(prefix="/v1", tags=["webhooks"])

OLD_SECRET_S = 86_400.0
SECRET_BYTES = 32
SAMPLE_JOB = "ftjob-sample"


@router.get("/webhook_event_types")
def list_event_types() -> EventTypeList:
    """What an endpoint can be told of."""
    return EventTypeList(data=list(get_args(EventType)))


@router.post("/webhook_endpoints")
def create_endpoint(request: EndpointRequest) -> NewEndpointObject:
    """Have events of your jobs sent to a URL. The secret they are signed with is in this answer and no later one."""
    with transaction() as session:
        row = WebhookEndpoint(
            id=new_id("whend_"), name=request.name, url=request.url, secret=_new_secret(),
            event_types=list(dict.fromkeys(request.event_types)),
        )  # fmt: skip
        session.add(row)
        session.flush()
        session.refresh(row)
        return new_endpoint_object(row)


@router.get("/webhook_endpoints")
def list_endpoints(paging: PagingDep) -> ListObject[EndpointObject]:
    """A page of endpoints, newest first."""
    with transaction(read_only=True) as session:
        return page(session, select(WebhookEndpoint), WebhookEndpoint.id, paging, shown=endpoint_object)


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
def retrieve_endpoint(webhook_endpoint_id: str) -> EndpointObject:
    """An endpoint."""
    with transaction(read_only=True) as session:
        return endpoint_object(_get(session, webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}")
def update_endpoint(webhook_endpoint_id: str, request: EndpointUpdate | None = None) -> EndpointObject:
    """Change an endpoint, or enable it again. What is not delivered yet goes to the new URL."""
    changes = {} if request is None else request.model_dump(exclude_none=True)
    with transaction() as session:
        row = _get(session, webhook_endpoint_id)
        before = endpoint_object(row)
        enabled = changes.pop("enabled", None)
        for name, value in changes.items():
            setattr(row, name, value)
        time = session.scalars(select(now())).one()
        if enabled is True:
            row.disabled_at = row.failing_since = None
        elif enabled is False:
            row.disabled_at = row.disabled_at or time
        if endpoint_object(row) != before:
            row.updated_at = time
        return endpoint_object(row)


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
def delete_endpoint(webhook_endpoint_id: str) -> EndpointDeleted:
    """Forget an endpoint, with its log and what it was not told yet."""
    with transaction() as session:
        session.delete(_get(session, webhook_endpoint_id))
    return EndpointDeleted(id=webhook_endpoint_id)


@router.post("/webhook_endpoints/{webhook_endpoint_id}/rotate_secret")
def rotate_secret(webhook_endpoint_id: str, request: RotateRequest | None = None) -> NewEndpointObject:
    """Replace the secret. The new one is in this answer and no later one."""
    with transaction() as session:
        row = _get(session, webhook_endpoint_id)
        time = session.scalars(select(now())).one()
        keep = request is not None and request.keep_old_secret_active_for_24_hours
        row.old_secret, row.old_secret_until = (row.secret, time + OLD_SECRET_S) if keep else (None, None)
        row.secret, row.updated_at = _new_secret(), time
        return new_endpoint_object(row)


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test")
def send_sample(webhook_endpoint_id: str, request: TestRequest | None = None) -> TestResult:
    """Send a sample now, and wait for the answer, of whatever status. 400 `delivery_failed` if there is none."""
    event_type = (request or TestRequest()).event_type
    with transaction(read_only=True) as session:
        row = _get(session, webhook_endpoint_id)
        time = session.scalars(select(now())).one()
    event_id = new_id("evt_")
    body = outbox.event_body(event_id, event_type, SAMPLE_JOB, time)
    outcome = delivery.send(row.url, event_id, body, delivery.valid_secrets(row, time))
    if outcome.status_code is None:
        raise BadRequest(f"The sample was not delivered: {outcome.error}.", param="url", code="delivery_failed")
    return TestResult(webhook_endpoint_id=row.id, event_type=event_type, status_code=outcome.status_code)


@router.get("/webhook_endpoints/{webhook_endpoint_id}/deliveries")
def list_deliveries(webhook_endpoint_id: str, paging: PagingDep) -> ListObject[DeliveryObject]:
    """What was sent, or is to be, newest first."""
    with transaction(read_only=True) as session:
        row = _get(session, webhook_endpoint_id)
        query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == row.id)
        return page(session, query, WebhookDelivery.id, paging, shown=delivery_object)


def _get(session: Session, endpoint_id: str) -> WebhookEndpoint:
    row = session.get(WebhookEndpoint, endpoint_id)
    if row is None:
        raise NotFound(f"No webhook endpoint has the id {endpoint_id!r}.", param="webhook_endpoint_id")
    return row


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
