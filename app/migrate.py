"""The schema: brought to this code's revision, or compared with it. Alembic is loaded only when asked."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine

from app.db import make_engine

if TYPE_CHECKING:
    from alembic.config import Config

FOLDER = Path(__file__).resolve().parent.parent / "migrations"


def upgrade(url: str, revision: str = "head") -> None:
    """Bring a database to `revision`, all of it or nothing; two at once are one after the other.

    alembic's CommandError, in one line, if the database is at a revision that this code does not know.
    """
    from alembic import command

    engine = make_engine(url)
    try:
        command.upgrade(_config(engine), revision)
    finally:
        engine.dispose()


def downgrade(url: str, revision: str) -> None:
    """Take a database back to `revision`; `base` leaves no table."""
    from alembic import command

    engine = make_engine(url)
    try:
        command.downgrade(_config(engine), revision)
    finally:
        engine.dispose()


def schema_fault(engine: Engine) -> str | None:
    """In one line, how the database's schema differs from the one that this code wants; None if it does not."""
    from alembic.runtime.migration import MigrationContext

    with engine.execution_options(read_only=True).connect() as connection:
        found = set(MigrationContext.configure(connection).get_current_heads())
    known, head = _revisions()
    if found == {head}:
        return None
    if not found <= known:
        return f"The database is at revision {', '.join(sorted(found))}, newer than this code: run the code it fits."
    return f"The database is behind this code (at {', '.join(found) or 'nothing'}): `alembic upgrade head`."


def current_is_head(engine: Engine) -> bool:
    """Whether the database's schema is the one that this code wants."""
    return schema_fault(engine) is None


@cache
def _revisions() -> tuple[frozenset[str], str]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", _escaped(FOLDER))
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    assert head is not None
    return frozenset(script.revision for script in scripts.walk_revisions()), head


def _config(engine: Engine) -> Config:
    from alembic.config import Config

    config = Config(attributes={"engine": engine})
    config.set_main_option("script_location", _escaped(FOLDER))
    return config


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")
