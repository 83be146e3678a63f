"""Sends what is in the outbox, signed as Standard Webhooks has it. An event may come twice, and then has one id."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from app.db import now, transaction
from app.settings import get_settings
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from qerl_core import address

FIRST_RETRY_S = 5.0
RETRY_FACTOR = 3.0
MAX_RETRY_S = 6 * 3600.0
GIVE_UP_S = 3 * 86_400.0
"""So long an event is tried for; an endpoint where nothing has arrived for so long is disabled."""
LEASE_S = 60.0
"""What a process has taken and not reported on is sent by another after this."""
BATCH = 32
THREADS = 8
GONE = 410


@dataclass(frozen=True, slots=True)
class Sending:
    """A delivery that this process has taken."""

    id: str
    endpoint_id: str
    attempt: int
    event_id: str
    url: str
    body: str
    secrets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a try."""

    status_code: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it arrived."""
        return self.status_code is not None and 200 <= self.status_code < 300


def deliver_due() -> int:
    """Send what is due, of all owners. Returns how many were tried. No session is held while anything is sent."""
    with transaction(read_only=True) as session:  # mostly there is nothing, and no lock is wanted for that
        if session.scalar(select(WebhookDelivery.id).where(WebhookDelivery.next_at <= now()).limit(1)) is None:
            return 0
    with transaction() as session:
        taken = _take(session)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="webhooks") as pool:
        for sending, outcome in zip(taken, pool.map(_send, taken), strict=True):
            with transaction() as session:
                _settle(session, sending, outcome)
    return len(taken)


def send(url: str, event_id: str, body: str, secrets: tuple[str, ...]) -> Outcome:
    """POST an event, signed with each of the secrets."""
    time = datetime.now(UTC)
    headers: dict[bytes | str, bytes | str] = {
        "content-type": "application/json",
        "user-agent": "qerl-webhooks",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(time.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(event_id, time, body) for secret in secrets),
    }
    try:
        reply = address.post(url, body.encode(), headers, private_hosts=get_settings().private_hosts)
    except (address.ForbiddenAddress, address.Unreachable) as error:
        return Outcome(error=str(error)[:256])
    return Outcome(status_code=reply.status)


def valid_secrets(endpoint: WebhookEndpoint, time: float) -> tuple[str, ...]:
    """The secret, and the one before it while that is valid."""
    if endpoint.old_secret is not None and (endpoint.old_secret_until or 0.0) > time:
        return (endpoint.secret, endpoint.old_secret)
    return (endpoint.secret,)


def retry_in_s(attempt: int) -> float:
    """Seconds from a failed try to the next: growing, and spread so that many do not come at once."""
    return min(FIRST_RETRY_S * RETRY_FACTOR ** min(attempt - 1, 20), MAX_RETRY_S) * random.uniform(0.75, 1.25)


def _take(session: Session) -> list[Sending]:
    due = select(WebhookDelivery).where(WebhookDelivery.next_at <= now()).order_by(WebhookDelivery.next_at).limit(BATCH)
    time = session.scalars(select(now())).one()
    taken = []
    for row in session.scalars(due.with_for_update(skip_locked=True)):
        endpoint = session.get_one(WebhookEndpoint, row.endpoint_id)
        row.attempts, row.next_at = row.attempts + 1, time + LEASE_S
        secrets = valid_secrets(endpoint, time)
        taken.append(Sending(row.id, endpoint.id, row.attempts, row.event_id, endpoint.url, row.body, secrets))
    return taken


def _send(sending: Sending) -> Outcome:
    return send(sending.url, sending.event_id, sending.body, sending.secrets)


def _settle(session: Session, sending: Sending, outcome: Outcome) -> None:
    """Note how a try ended, unless another process has taken the delivery meanwhile or its endpoint was deleted."""
    held = (WebhookDelivery.id == sending.id, WebhookDelivery.attempts == sending.attempt)
    row = session.scalar(select(WebhookDelivery).where(*held).with_for_update())
    if row is None or row.next_at is None:
        return
    time = session.scalars(select(now())).one()
    row.status_code, row.error, row.next_at = outcome.status_code, outcome.error, None
    endpoint = session.get_one(WebhookEndpoint, row.endpoint_id, with_for_update=True)
    if outcome.ok:
        row.delivered_at, endpoint.failing_since = time, None
        return
    endpoint.failing_since = endpoint.failing_since or time
    if outcome.status_code == GONE or time - endpoint.failing_since >= GIVE_UP_S:
        endpoint.disabled_at = time
        waiting = (WebhookDelivery.endpoint_id == endpoint.id, WebhookDelivery.next_at.is_not(None))
        session.flush()
        session.execute(update(WebhookDelivery).where(*waiting).values(next_at=None, error="the endpoint is disabled"))
        return
    next_at = time + retry_in_s(row.attempts)
    if next_at - row.created_at <= GIVE_UP_S:
        row.next_at = next_at
