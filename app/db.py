"""Engine, sessions and the database's own clock. One request or task is one transaction."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Double, Engine, MetaData, create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.sql.expression import FunctionElement

from app.settings import get_settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY = (OperationalError, InterfaceError)
"""What is raised while the database cannot be reached."""


class Base(DeclarativeBase):
    """The tables. Times are the database's, in seconds since 1970 (UTC), as the API gives them."""

    # Names as PostgreSQL would give them, so that a migration can name what it changes on SQLite too.
    metadata = MetaData(
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
            "uq": "%(table_name)s_%(column_0_name)s_key",
        }
    )


class now(FunctionElement[float]):
    """The database's clock: seconds since 1970 with a fraction. Leases compare these, so no worker's clock counts."""

    type = Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: Any, **kw: Any) -> str:
    return "EXTRACT(EPOCH FROM clock_timestamp())::double precision"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


def _to_json(value: Any) -> str:
    """JSON with text as it is: SQLite does not find a key that was written with escapes. No NaN, as in PostgreSQL."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace").decode()  # an unpaired surrogate has no UTF-8


def make_engine(url: str) -> Engine:
    """An engine with the settings that each database needs to be shared by several processes."""
    if not url.startswith("sqlite"):
        # Leases count on an answer, if only a bad one, in seconds: a dead host would else be waited for for minutes.
        timeouts = {"connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "tcp_user_timeout": 10_000}
        return create_engine(url, pool_pre_ping=True, connect_args=timeouts, json_serializer=_to_json)
    engine = create_engine(url, connect_args={"timeout": 30, "isolation_level": None}, json_serializer=_to_json)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, record: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    # A transaction that will write takes the lock at its start: one that upgrades later fails at once
    # with "database is locked", whatever the busy timeout.
    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


@cache
def get_engine() -> Engine:
    """This process's engine. Call `reset()` after a fork."""
    return make_engine(get_settings().database_url)


def reset() -> None:
    """Forget the engine without closing its connections: they belong to the process that was forked from."""
    if get_engine.cache_info().currsize:
        get_engine().dispose(close=False)
        get_engine.cache_clear()


@contextmanager
def transaction(*, read_only: bool = False) -> Iterator[Session]:
    """A session that commits at the end, or rolls back what an error left."""
    bind = get_engine().execution_options(read_only=True) if read_only else get_engine()
    with Session(bind, expire_on_commit=False) as session, session.begin():
        yield session


def patiently(work: Callable[[Session], T], *, patience_s: float) -> T:
    """Do `work` in a transaction, and again while the database is away, for so long.

    It may be done twice: when all that was lost is the answer to its commit.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with transaction() as session:
                return work(session)
        except AWAY as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("the database is away, trying again: %s", error.orig)
            time.sleep(0.5)
