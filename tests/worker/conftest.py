"""Jobs whose run is played by the test."""

from collections.abc import Callable

import pytest

from app import db
from app.jobs import service
from app.jobs.models import Job
from app.jobs.service import Lease
from app.storage import get_store

CONFIG = {
    "model": {"id": "tiny", "source": "tiny"},
    "data": {"train_path": "files/rows.jsonl"},
    "grader": {"type": "math", "reference": "{{ item.answer }}"},
    "noise": None,
    "num_steps": 4,
}


@pytest.fixture
def submit(database, tmp_path) -> Callable[[], str]:
    """Queue a job of four steps; returns its id."""

    def add() -> str:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"messages": []}\n')
        get_store().put("files/rows.jsonl", rows)
        job = Job(model="tiny", training_file="file-1", request={}, config=CONFIG, total_steps=4)
        with db.transaction() as session:
            return service.submit(session, job).id

    return add


@pytest.fixture
def lease(submit) -> Lease:
    """The first attempt at a job."""
    with db.transaction() as session:
        return service.claim(session, submit(), "test")


@pytest.fixture
def read() -> Callable[[str], Job]:
    """A job's row as it is now."""

    def get(job_id: str) -> Job:
        with db.transaction(read_only=True) as session:
            return service.get(session, job_id)

    return get
