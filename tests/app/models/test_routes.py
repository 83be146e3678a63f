from urllib.parse import quote

from app import db
from app.jobs import service
from tests.app.conftest import MODEL


def succeed(job_id: str) -> None:
    with db.transaction() as session:
        service.succeed(session, service.claim(session, job_id, "test"))


def test_base_models_and_then_those_of_succeeded_jobs_are_listed(client, create):
    done, queued = create(suffix="sums"), create(suffix="other")
    succeed(done["id"])

    listed = client.get("/v1/models").json()

    name = f"ft:{MODEL}:local:sums:{done['id'][-8:]}"
    assert listed["object"] == "list"
    assert [(model["id"], model["owned_by"]) for model in listed["data"]] == [(MODEL, "base"), (name, "local")]
    assert all(model["object"] == "model" and isinstance(model["created"], int) for model in listed["data"])
    assert client.get(f"/v1/fine_tuning/jobs/{done['id']}").json()["fine_tuned_model"] == name
    assert client.get(f"/v1/fine_tuning/jobs/{queued['id']}").json()["fine_tuned_model"] is None


def test_a_model_is_read_by_its_name(client, create):
    job = create()
    unfinished = f"ft:{MODEL}:local::{job['id'][-8:]}"

    assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert client.get(f"/v1/models/{quote(unfinished, safe='')}").status_code == 404
    succeed(job["id"])
    assert client.get(f"/v1/models/{quote(unfinished, safe='')}").json()["id"] == unfinished
