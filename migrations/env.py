"""What alembic runs: the migrations, in one transaction, on the service's database or the one handed to it."""

from alembic import context
from sqlalchemy import Connection, text

import app.files.models
import app.jobs.models
import app.keys.models
import app.webhooks.models  # noqa: F401 - they fill Base.metadata
from app.db import Base, make_engine
from app.settings import get_settings

LOCK = 7_135_001
"""Any number that nothing else locks: on PostgreSQL, two upgrades at once would both create the first table."""


def run() -> None:
    """Migrate. SQLite's DDL is transactional too, since our engine begins its transactions itself."""
    engine = context.config.attributes.get("engine") or make_engine(get_settings().database_url)
    with engine.connect() as connection:
        _let_tables_be_rebuilt(connection)
        context.configure(
            connection=connection, target_metadata=Base.metadata, render_as_batch=True, transactional_ddl=True
        )
        with context.begin_transaction():
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            context.run_migrations()


def _let_tables_be_rebuilt(connection: Connection) -> None:
    """SQLite changes a table by copying it and dropping the old one, which would delete all that refers to it."""
    if connection.dialect.name == "sqlite":  # past SQLAlchemy: inside a transaction the pragma does nothing
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("PRAGMA foreign_keys=OFF")


run()
