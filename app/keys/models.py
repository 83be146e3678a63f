"""The row of an API key. The key itself is nowhere: only its hash is kept."""

from sqlalchemy import BigInteger, CheckConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.callers import DEFAULT_OWNER, Scope
from app.db import Base, now

_SCOPES = ", ".join(f"'{scope}'" for scope in Scope)


class ApiKey(Base):
    """A key, kept when it is revoked: while there is any row, nobody gets in without a key."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint(f"scope IN ({_SCOPES})", name="api_keys_scope"),
        Index("api_keys_by_prefix", "prefix"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(insert_default=now())
    name: Mapped[str] = mapped_column(String(128))
    owner: Mapped[str] = mapped_column(String(64), default=DEFAULT_OWNER)
    """The project that files and jobs made with it belong to; keys of one owner share them."""
    scope: Mapped[str] = mapped_column(String(8))
    """The widest of its scopes."""
    prefix: Mapped[str] = mapped_column(String(16))
    """How the key begins, for looking it up and for telling it from others."""
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """To the minute."""
    revoked_at: Mapped[float | None]


class RequestCount(Base):
    """A key's requests in the minute of its last one."""

    __tablename__ = "request_counts"

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    minute: Mapped[int] = mapped_column(BigInteger)
    """Since 1970."""
    count: Mapped[int]
