"""Requests a minute, counted in SQL: one row a key, so the count holds over all API processes, with Redis away too."""

from dataclasses import dataclass

from sqlalchemy import Integer, case, cast, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.callers import Caller
from app.db import now, transaction
from app.errors import RateLimited
from app.keys.models import RequestCount
from app.settings import get_settings

WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class Window:
    """What a key has left of the minute."""

    limit: int
    remaining: int
    reset_s: int

    def headers(self) -> dict[str, str]:
        """As OpenAI tells it."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.reset_s}s",
        }


def count_request(caller: Caller) -> Window | None:
    """Count a request of a key's. None if nothing limits it; RateLimited once the minute's are used up."""
    limit = get_settings().requests_per_minute
    if limit is None or caller.key_id is None:
        return None
    with transaction() as session:
        time = session.scalars(select(now())).one()
        count = _count(session, caller.key_id, int(time // WINDOW_S))
    window = Window(limit, max(limit - count, 0), max(int(WINDOW_S - time % WINDOW_S), 1))
    if count > limit:
        raise RateLimited(
            f"This key may send {limit} requests a minute: try again in {window.reset_s} s.",
            headers={"retry-after": str(window.reset_s), **window.headers()},
        )
    return window


def _count(session: Session, key_id: str, minute: int) -> int:
    make = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    row = make(RequestCount).values(key_id=key_id, minute=minute, count=1)
    same = RequestCount.minute == row.excluded.minute
    changes = {"minute": row.excluded.minute, "count": cast(case((same, RequestCount.count + 1), else_=1), Integer)}
    counted = row.on_conflict_do_update(index_elements=["key_id"], set_=changes).returning(RequestCount.count)
    return session.scalars(counted).one()
