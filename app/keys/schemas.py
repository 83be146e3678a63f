"""API keys on the wire."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.callers import DEFAULT_OWNER, Scope
from app.keys.models import ApiKey

OWNER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MAX_TIME = 253_402_300_799
"""The last second of the year 9999."""


class KeyRequest(BaseModel):
    """A key to be made."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")
    """What it is for, for people."""
    owner: str = Field(DEFAULT_OWNER, max_length=64, pattern=OWNER_PATTERN)
    """The project that files and jobs made with it belong to; keys of one owner share them."""
    scopes: list[Scope] = Field(default=[Scope.READ, Scope.WRITE], min_length=1, max_length=3)
    """`read` for GET, `write` for everything else, `admin` for keys, and for what is others'. Each includes the ones
    before it."""
    expires_at: int | None = Field(None, gt=0, le=MAX_TIME)
    """When it stops to work, in seconds since 1970; null: never."""

    def widest(self) -> Scope:
        """The scope that includes the others."""
        return max(self.scopes, key=list(Scope).index)


class KeyObject(BaseModel):
    """An API key, without the key."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    owner: str
    scopes: list[Scope]
    redacted_value: str
    """How the key begins."""
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    """To the minute."""
    revoked_at: int | None


class NewKeyObject(KeyObject):
    """A key that was just made."""

    value: str
    """The key: shown this once, and kept nowhere."""


class KeyDeleted(BaseModel):
    """The answer to a revocation; the key's row stays, and says when it was."""

    id: str
    object: Literal["api_key"] = "api_key"
    deleted: Literal[True] = True


def key_object(key: ApiKey) -> KeyObject:
    """What an admin sees of a row."""
    order = list(Scope)
    return KeyObject(
        id=key.id, name=key.name, owner=key.owner, scopes=order[: order.index(Scope(key.scope)) + 1],
        redacted_value=f"{key.prefix}...", created_at=int(key.created_at), expires_at=_seconds(key.expires_at),
        last_used_at=_seconds(key.last_used_at), revoked_at=_seconds(key.revoked_at),
    )  # fmt: skip


def new_key_object(key: ApiKey, text: str) -> NewKeyObject:
    """The same with the key's text."""
    return NewKeyObject(value=text, **key_object(key).model_dump())


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
