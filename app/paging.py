"""`after`, `limit` and `has_more` over ids that sort by time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel
from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.errors import NotFound


class HasId(Protocol):
    """What a list can go on after."""

    id: str


T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound=HasId)


class ListObject(BaseModel, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


@dataclass(frozen=True, slots=True)
class Paging:
    """Where a page starts and how long it is."""

    after: Annotated[str | None, Query(description="The last id of the page before.")] = None
    limit: Annotated[int, Query(ge=1, le=100)] = 20


PagingDep = Annotated[Paging, Depends()]


def page(
    session: Session,
    query: Select[R],
    row_id: InstrumentedAttribute[str],
    paging: Paging,
    *,
    shown: Callable[[R], S],
    ascending: bool = False,
) -> "ListObject[S]":  # quoted: pydantic would want a schema of the bound
    """A page of `query`, newest first. NotFound if `after` is not in the list: the first page again would loop."""
    if paging.after is not None:
        if session.scalar(query.where(row_id == paging.after)) is None:
            raise NotFound(f"The list has no entry {paging.after!r} to go on after.", param="after")
        query = query.where(row_id > paging.after if ascending else row_id < paging.after)
    ordered = query.order_by(row_id.asc() if ascending else row_id.desc()).limit(paging.limit + 1)
    rows = session.scalars(ordered).all()
    data = [shown(row) for row in rows[: paging.limit]]
    ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {}
    return ListObject(data=data, has_more=len(rows) > paging.limit, **ends)
