"""Who asks, and what is theirs: inside a request every query sees the caller's own rows, as if no others were there.

The filter is on the session and not in the routes, so that a route that is added tomorrow has it too. Workers and
sweeps have no caller and see all; so does a caller with the admin scope, and a query with the execution option
`all_owners`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import String, event, select
from sqlalchemy.orm import Mapped, ORMExecuteState, Session, mapped_column, with_loader_criteria

from app.db import Base

DEFAULT_OWNER = "default"
"""Whose what was made before there were keys is, and what is made without one."""

ALL_OWNERS = "all_owners"


class Scope(StrEnum):
    """What a key may do; each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    owner: str
    scope: Scope
    key_id: str | None = None
    """None without keys, and for the key of `QERL_ADMIN_KEY`."""

    def may(self, wanted: Scope) -> bool:
        """Whether the caller's key reaches so far."""
        order = list(Scope)
        return order.index(self.scope) >= order.index(wanted)


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current() -> Caller | None:
    """The caller of the request that this is part of; None in a worker or a sweep."""
    return _caller.get()


def current_owner() -> str:
    """Whose a new row is."""
    caller = current()
    return DEFAULT_OWNER if caller is None else caller.owner


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Queries inside see the caller's rows, and new ones are the caller's."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


class Owned:
    """A table whose rows belong to somebody. What hangs on a job by `job_id` belongs to the job's owner."""

    owner: Mapped[str] = mapped_column(String(64), insert_default=current_owner, server_default=DEFAULT_OWNER)


@event.listens_for(Session, "do_orm_execute")
def _show_the_callers_own(query: ORMExecuteState) -> None:
    caller = current()
    if caller is None or caller.may(Scope.ADMIN) or query.execution_options.get(ALL_OWNERS, False):
        return
    if query.is_select or query.is_update or query.is_delete:
        query.statement = query.statement.options(*_own(caller.owner))


def _own(owner: str) -> list[Any]:
    jobs = Base.metadata.tables["jobs"]
    own_jobs = select(jobs.c.id).where(jobs.c.owner == owner)
    criteria: list[Any] = []
    for mapper in Base.registry.mappers:
        table: Any = mapper.class_
        if issubclass(table, Owned):
            criteria.append(with_loader_criteria(table, table.owner == owner))
        elif "job_id" in mapper.columns:
            criteria.append(with_loader_criteria(table, table.job_id.in_(own_jobs)))
    return criteria
