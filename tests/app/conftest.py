"""A client of the app in this process: SQLite, a broker in memory, data sets and jobs in a line."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import Settings
from tests.live import settings_of_process

MODEL = "SmolLM2-135M-Instruct"
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}


@pytest.fixture
def settings(tmp_path) -> Iterator[Settings]:
    """This process's settings, with a broker that takes messages and forgets them."""
    made = Settings(home=tmp_path / "home", redis_url=f"memory://{tmp_path.name}", sweep_s=60.0)
    made.home.mkdir()
    with settings_of_process(made) as settings:
        yield settings


@pytest.fixture
def client(database) -> Iterator[TestClient]:
    """A client of the API, started."""
    from app.main import create_app

    with TestClient(create_app()) as client:
        yield client


@pytest.fixture
def upload(client) -> Callable[..., str]:
    """Upload so many sums; returns the file's id."""

    def upload(num_rows: int = 16, **row: Any) -> str:
        files = {"file": ("sums.jsonl", sums(num_rows, **row))}
        response = client.post("/v1/files", files=files, data={"purpose": "fine-tune"})
        assert response.status_code == 200, response.text
        return response.json()["id"]

    return upload


@pytest.fixture
def body(upload) -> dict[str, Any]:
    """The least that a create wants."""
    return {"model": MODEL, "training_file": upload(), "method": reinforcement()}


@pytest.fixture
def create(client, body) -> Callable[..., dict[str, Any]]:
    """Create a job; keyword arguments replace parts of the least body."""

    def create(**changes: Any) -> dict[str, Any]:
        response = client.post("/v1/fine_tuning/jobs", json=body | changes)
        assert response.status_code == 200, response.text
        return response.json()

    return create


def sums(num_rows: int, **row: Any) -> bytes:
    """A data set in which each row has an answer."""
    rows = (
        {"messages": [{"role": "user", "content": f"{i} + 1 ="}], "answer": str(i + 1), **row} for i in range(num_rows)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def reinforcement(**changes: Any) -> dict[str, Any]:
    """The method, with parts replaced or added."""
    return {"type": "reinforcement", "reinforcement": {"grader": GRADER, **changes}}
