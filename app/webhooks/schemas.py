"""Webhook endpoints on the wire, as OpenAI's SDK has them; `enabled` and deliveries are ours."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.settings import get_settings
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from qerl_core import address

EventType = Literal[
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
    "fine_tuning.job.paused",
    "fine_tuning.job.running",
]


def _may_be_asked(url: str) -> str:
    address.check_url(url, private_hosts=get_settings().private_hosts)
    return url


Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Url = Annotated[str, Field(max_length=address.MAX_URL), AfterValidator(_may_be_asked)]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=32)]


class Request(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EndpointRequest(Request):
    """An endpoint to be made."""

    name: Name
    url: Url
    """https, on the public internet, or on a host of the operator's `QERL_PRIVATE_HOSTS`."""
    event_types: EventTypes


class EndpointUpdate(Request):
    """What is to change; the rest stays."""

    name: Name | None = None
    url: Url | None = None
    event_types: EventTypes | None = None
    enabled: bool | None = None
    """`true` sends events again to an endpoint that was disabled since nothing arrived there."""


class RotateRequest(Request):
    """How a secret is replaced."""

    keep_old_secret_active_for_24_hours: bool = False
    """Sign with both for a day."""


class TestRequest(Request):
    """What to send."""

    event_type: EventType = "fine_tuning.job.succeeded"


class EndpointObject(BaseModel):
    """An endpoint, without its secret."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    """How the secret ends."""
    enabled: bool
    """False: nothing arrived for three days, or it answered 410 Gone, and nothing is sent any more."""


class NewEndpointObject(EndpointObject):
    """An endpoint whose secret is new."""

    signing_secret: str
    """Shown this once."""


class EndpointDeleted(BaseModel):
    """The answer to a DELETE."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class TestResult(BaseModel):
    """How the endpoint answered a sample."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True] = True


class EventTypeList(BaseModel):
    """What can be told."""

    object: Literal["list"] = "list"
    data: list[str]


class DeliveryObject(BaseModel):
    """An event on its way, or at its end."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    created_at: int
    event_id: str
    """The `webhook-id` header."""
    event_type: str
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    next_attempt_at: int | None
    delivered_at: int | None
    status_code: int | None
    """Of the last answer."""
    error: str | None
    """Why the last try had no answer."""


def endpoint_object(row: WebhookEndpoint) -> EndpointObject:
    """What is shown of a row."""
    return EndpointObject(
        id=row.id, created_at=int(row.created_at), updated_at=int(row.updated_at), name=row.name, url=row.url,
        event_types=row.event_types, signing_secret_hint=f"...{row.secret[-4:]}", enabled=row.disabled_at is None,
    )  # fmt: skip


def new_endpoint_object(row: WebhookEndpoint) -> NewEndpointObject:
    """The same with the secret."""
    return NewEndpointObject(signing_secret=row.secret, **endpoint_object(row).model_dump())


def delivery_object(row: WebhookDelivery) -> DeliveryObject:
    """What is shown of a delivery."""
    ended: Literal["delivered", "failed"] = "delivered" if row.delivered_at is not None else "failed"
    return DeliveryObject(
        id=row.id, created_at=int(row.created_at), event_id=row.event_id, event_type=row.event_type,
        status=ended if row.next_at is None else "pending", attempts=row.attempts,
        next_attempt_at=None if row.next_at is None else int(row.next_at),
        delivered_at=None if row.delivered_at is None else int(row.delivered_at),
        status_code=row.status_code, error=row.error,
    )  # fmt: skip
