"""Jobs in each kind of database, without a client."""

from collections.abc import Callable, Iterator

import pytest

from app import db
from app.jobs import service
from app.jobs.models import Job
from app.migrate import upgrade
from app.settings import Settings
from tests.live import settings_of_process


@pytest.fixture
def either_database(database_url, tmp_path) -> Iterator[None]:
    """The tables, empty, in this process's database: SQLite and PostgreSQL in turn."""
    made = Settings(home=tmp_path / "home", database_url=database_url, redis_url=f"memory://{tmp_path.name}")
    made.home.mkdir()
    with settings_of_process(made):
        upgrade(database_url)
        yield


@pytest.fixture
def queue(either_database) -> Callable[..., str]:
    """Queue a job; returns its id."""

    def queue(**columns: object) -> str:
        least = {"model": "tiny", "training_file": "file-1", "request": {}, "config": {}, "total_steps": 4}
        job = Job(**least | columns)
        with db.transaction() as session:
            return service.submit(session, job).id

    return queue


@pytest.fixture
def read(either_database) -> Callable[[str], Job]:
    """A job's row as it is now."""

    def read(job_id: str) -> Job:
        with db.transaction(read_only=True) as session:
            return service.get(session, job_id)

    return read
