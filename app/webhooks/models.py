"""Where owners want to be told of their jobs, and what is to be told, was told, or could not be."""

from sqlalchemy import JSON, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.callers import Owned
from app.db import Base, now


class WebhookEndpoint(Owned, Base):
    """A URL that events are sent to."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(insert_default=now())
    updated_at: Mapped[float] = mapped_column(insert_default=now())
    name: Mapped[str] = mapped_column(String(128))
    url: Mapped[str] = mapped_column(String(2048))
    event_types: Mapped[list[str]] = mapped_column(JSON)
    secret: Mapped[str] = mapped_column(String(128))
    """In the clear: each delivery is signed with it."""
    old_secret: Mapped[str | None] = mapped_column(String(128))
    old_secret_until: Mapped[float | None]
    failing_since: Mapped[float | None]
    """When the first of the deliveries that have failed ever since was sent."""
    disabled_at: Mapped[float | None]


class WebhookDelivery(Owned, Base):
    """An event on its way to an endpoint: written with what it tells of, and kept as the log."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("webhook_deliveries_due", "next_at"),
        Index("webhook_deliveries_by_endpoint", "endpoint_id", "id"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(insert_default=now())
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(String(64))
    """The same for all endpoints and tries: receivers know by it what they have had."""
    event_type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    next_at: Mapped[float | None] = mapped_column(insert_default=now())
    """When it is to be sent, or sent again; None once it arrived or was given up."""
    attempts: Mapped[int] = mapped_column(default=0)
    delivered_at: Mapped[float | None]
    status_code: Mapped[int | None]
    """Of the last answer."""
    error: Mapped[str | None] = mapped_column(String(256))
    """Why there was no answer to the last try."""
