import subprocess
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import inspect, text

import app.files.models
import app.jobs.models
import app.keys.models  # noqa: F401 - they fill Base.metadata
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
        assert len(connection.scalars(text("SELECT version_num FROM alembic_version")).all()) == 1


OLD_ROWS = (
    "INSERT INTO files VALUES ('file-1', 1, 'a.jsonl', 'fine-tune', 1, 1, 'x', 'files/1')",
    "INSERT INTO jobs (id, created_at, state, model, training_file, fine_tuned_model, request, config,"
    " idempotency_key, retried, attempt, losses, step, total_steps, trained_tokens)"
    " VALUES ('ftjob-1', 1, 'queued', 'm', 'file-1', 'ft:m', '{}', '{}', 'mine', false, 0, 0, 0, 1, 0)",
    "INSERT INTO events (id, job_id, created_at, level, type, message, data)"
    " VALUES ('ftevent-1', 'ftjob-1', 1, 'info', 'message', 'Created', '{}')",
)


def test_rows_from_before_keys_are_the_default_owners_and_nothing_of_them_is_lost_either_way(database_url, engine):
    upgrade(database_url, "0001")
    with engine.begin() as connection:
        for row in OLD_ROWS:
            connection.execute(text(row))

    def counts() -> list[int]:
        with engine.connect() as connection:
            return [connection.scalar(text(f"SELECT count(*) FROM {table}")) for table in ("files", "jobs", "events")]

    upgrade(database_url)
    with engine.connect() as connection:
        owners = connection.scalars(text("SELECT owner FROM jobs UNION ALL SELECT owner FROM files")).all()
    assert owners == ["default", "default"]
    assert counts() == [1, 1, 1]
    downgrade(database_url, "0001")
    assert counts() == [1, 1, 1]


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
