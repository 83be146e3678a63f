"""Keys are made, known again and revoked. 32 random bytes are beyond guessing, so a plain sha256 hides them."""

import hashlib
import hmac
import ipaddress
import secrets
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from app.callers import DEFAULT_OWNER, Caller, Scope
from app.db import now, transaction
from app.errors import BadRequest, Forbidden, NotFound, Unauthorized
from app.ids import new_id
from app.keys.models import ApiKey
from app.settings import get_settings

MARK = "qerl-"
PREFIX_CHARS = len(MARK) + 8
KEY_BYTES = 32
USED_EVERY_S = 60.0
MAX_KEY_CHARS = 512

OPEN = Caller(DEFAULT_OWNER, Scope.ADMIN)
"""Whoever asks while there are no keys."""


def create(
    session: Session, name: str, *, owner: str = DEFAULT_OWNER, scope: Scope = Scope.WRITE,
    expires_at: float | None = None,
) -> tuple[ApiKey, str]:  # fmt: skip
    """A new key, and its text, which is shown this once. BadRequest if it would have expired already."""
    if expires_at is not None and expires_at <= session.scalars(select(now())).one():
        raise BadRequest("expires_at is in the past: give a later time, or leave it out.", param="expires_at")
    text = MARK + secrets.token_urlsafe(KEY_BYTES)
    key = ApiKey(
        id=new_id("key_"), name=name, owner=owner, scope=scope, prefix=text[:PREFIX_CHARS], sha256=_digest(text),
        expires_at=expires_at,
    )  # fmt: skip
    session.add(key)
    session.flush()
    return key, text


def get(session: Session, key_id: str) -> ApiKey:
    """The key; NotFound if there is none."""
    key = session.get(ApiKey, key_id)
    if key is None:
        raise NotFound(f"No API key has the id {key_id!r}.", param="key_id")
    return key


def revoke(session: Session, key_id: str) -> ApiKey:
    """Let a key in no more, from its next request on. Again is no error."""
    get(session, key_id)
    session.execute(update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=now()))
    return session.get_one(ApiKey, key_id, populate_existing=True)


def any_exist() -> bool:
    """Whether there is a key, be it a revoked one: then nobody gets in without."""
    if get_settings().admin_key is not None:
        return True
    with transaction(read_only=True) as session:
        return session.scalar(select(ApiKey.id).limit(1)) is not None


def authenticate(authorization: str | None, *, reached_at: str | None = None) -> Caller:
    """Whose request this is, by its Authorization header. Unauthorized, whatever is wrong with the key.

    While there are no keys anybody may do everything, on this machine: `reached_at`, the address of ours that the
    request came to, must not be one that others reach.
    """
    text = _bearer(authorization)
    admin_key = get_settings().admin_key
    if text and admin_key and hmac.compare_digest(_digest(text), _digest(admin_key.get_secret_value())):
        return Caller(DEFAULT_OWNER, Scope.ADMIN)
    if text and (caller := _known(text)):
        return caller
    if any_exist():
        raise Unauthorized(
            "Incorrect API key provided: send a key of this service as `Authorization: Bearer qerl-...`."
            if authorization
            else "You didn't provide an API key: send one as `Authorization: Bearer qerl-...`."
        )
    if reached_at is not None and not is_loopback(reached_at):
        raise Unauthorized(
            "There are no API keys yet, and until then only this machine is served: `qerl keys create` makes one."
        )
    return OPEN


def permit(caller: Caller, wanted: Scope) -> None:
    """Forbidden if the caller's key does not reach so far."""
    if not caller.may(wanted):
        raise Forbidden(
            f"This key has the scope {caller.scope}, and this needs {wanted}: use a key that has it.",
            code="insufficient_permissions",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; what is no address, such as a socket's path, counts as local."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _known(text: str) -> Caller | None:
    digest, found = _digest(text), None
    usable = (ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now()))
    stale = func.coalesce(ApiKey.last_used_at, 0.0) < now() - USED_EVERY_S
    query: Any = select(ApiKey, stale).where(ApiKey.prefix == text[:PREFIX_CHARS], *usable)
    with transaction(read_only=True) as session:
        for key, is_stale in session.execute(query):
            if hmac.compare_digest(key.sha256, digest):
                found = key, is_stale
    if found is None:
        return None
    key, is_stale = found
    if is_stale:
        with transaction() as session:
            session.execute(update(ApiKey).where(ApiKey.id == key.id, stale).values(last_used_at=now()))
    return Caller(key.owner, Scope(key.scope), key.id)


def _bearer(authorization: str | None) -> str | None:
    """The key in a header; None if it holds nothing that could be one."""
    kind, _, text = (authorization or "").partition(" ")
    text = text.strip()
    return text if kind.lower() == "bearer" and text.isascii() and 0 < len(text) <= MAX_KEY_CHARS else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
