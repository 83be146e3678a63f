import subprocess
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import inspect, text

import app.files.models
import app.jobs.models  # noqa: F401 - both fill Base.metadata
from app.db import Base, make_engine
from app.migrate import current_is_head, downgrade, schema_fault, upgrade


@pytest.fixture
def engine(database_url):
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


def test_the_migrated_schema_is_the_models(database_url, engine):
    upgrade(database_url)

    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    assert differences == []
    assert current_is_head(engine)


def test_a_downgrade_to_base_leaves_no_table(database_url, engine):
    upgrade(database_url)

    downgrade(database_url, "base")

    assert inspect(engine).get_table_names() == ["alembic_version"]
    assert "behind this code (at nothing)" in schema_fault(engine)
    upgrade(database_url)
    assert current_is_head(engine)


def test_two_upgrades_at_once_are_one(database_url, engine):
    command = [sys.executable, "-c", f"from app.migrate import upgrade; upgrade({database_url!r})"]
    processes = [subprocess.Popen(command) for _ in range(3)]

    assert [process.wait() for process in processes] == [0, 0, 0]
    assert current_is_head(engine)
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["0001"]


def test_a_database_that_is_newer_than_the_code_is_said_in_a_line(database_url, engine):
    upgrade(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    assert schema_fault(engine) == "The database is at revision 9999, newer than this code: run the code it fits."
    with pytest.raises(CommandError, match="9999"):
        upgrade(database_url)


def test_an_upgrade_that_fails_leaves_nothing(database_url, engine):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE step_metrics (job_id TEXT)"))  # in the way of one that comes late

    with pytest.raises(Exception, match="step_metrics"):
        upgrade(database_url)

    assert inspect(engine).get_table_names() == ["step_metrics"]
