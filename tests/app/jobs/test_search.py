import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select
from starlette.datastructures import QueryParams

from app import db
from app.errors import BadRequest
from app.jobs.models import Job
from app.jobs.search import with_metadata
from app.main import create_app

PAIRS = {"a": "1", "b c": "x", "{d,e}": "y", "it's": "z", "ключ": "ü", "empty": "", "a.b": "dotted", "0": "zero"}


def found(**query: str) -> list[str]:
    with db.transaction(read_only=True) as session:
        return list(session.scalars(with_metadata(select(Job), QueryParams(query)).with_only_columns(Job.id)))


def test_jobs_are_found_by_any_pair_on_any_database(queue):
    with_pairs, without, _ = (
        queue(request={"metadata": PAIRS}),
        queue(request={"metadata": None}),
        queue(request={"metadata": {"a": "2"}}),
    )

    for key, value in PAIRS.items():
        assert found(**{f"metadata[{key}]": value}) == [with_pairs], key
    assert found(**{"metadata[a]": "1", "metadata[empty]": ""}) == [with_pairs]
    assert found(**{"metadata[a]": "1", "metadata[b c]": "y"}) == []
    assert found(metadata="null") == [without]


@pytest.mark.parametrize("key", ['quo"te', "back\\slash"])
def test_a_key_that_cannot_be_searched_for_is_refused(key):
    with pytest.raises(BadRequest):
        with_metadata(select(Job), QueryParams({f"metadata[{key}]": "x"}))


@pytest.mark.parametrize("path", ["/v1/files/a%00", "/v1/files?after=%00", "/v1/fine_tuning/jobs/%00/events"])
def test_text_that_a_database_cannot_hold_is_no_error_of_ours(either_database, path):
    with TestClient(create_app()) as client:
        response = client.get(path)

    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]
