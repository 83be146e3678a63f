"""What is another's is as if it were not there: on every route with an id, in lists, and in what a create names."""

import re

import pytest
from sqlalchemy import select

from app.callers import Caller, Scope, acting_for
from app.db import transaction
from app.jobs import service as jobs
from app.jobs.models import Checkpoint, Job
from app.jobs.service import Artifact
from app.jobs.state import JobState
from app.keys import service
from app.storage import get_store
from app.webhooks.models import WebhookEndpoint
from tests.app.conftest import MODEL, reinforcement, sums


@pytest.fixture
def ada(client, database):
    return _as(client, "ada")


@pytest.fixture
def bob(client, database):
    return _as(client, "bob")


@pytest.fixture
def admin(client, database):
    return _as(client, "operator", Scope.ADMIN)


def _as(client, owner: str, scope: Scope = Scope.WRITE):
    """Requests with a key of an owner's."""
    with transaction() as session:
        _, text = service.create(session, owner, owner=owner, scope=scope)

    def request(method: str, path: str, headers: dict[str, str] | None = None, **options):
        sent = {"authorization": f"Bearer {text}", **(headers or {})}
        return client.request(method, path, headers=sent, **options)

    return request


def upload(request) -> str:
    options = {"files": {"file": ("a.jsonl", sums(16))}, "data": {"purpose": "fine-tune"}}
    return request("POST", "/v1/files", **options).json()["id"]


def create(request, file_id: str, **options):
    body = {"model": MODEL, "training_file": file_id, "method": reinforcement()}
    return request("POST", "/v1/fine_tuning/jobs", json=body, **options)


@pytest.fixture
def made(ada) -> dict[str, str]:
    """One of everything, of ada's, by the name that routes give its id."""
    file_id = upload(ada)
    job_id = create(ada, file_id).json()["id"]
    with transaction() as session:
        lease = jobs.claim(session, job_id, "worker")
        checkpoint = jobs.publish(session, lease, 1, Artifact("archive", "0" * 64, 3), {})
        jobs.record_step(session, lease, 1, {"reward/mean": 1.0})
        jobs.succeed(session, lease)
        name = jobs.get(session, job_id).fine_tuned_model
        ids = {"file_id": file_id, "job_id": job_id, "checkpoint": checkpoint.id, "model": name}
        endpoint = WebhookEndpoint(
            id="whend_1", owner="ada", name="n", url="https://192.0.2.1/", event_types=["fine_tuning.job.failed"],
            secret="whsec_" + "A" * 44,
        )  # fmt: skip
        session.add(endpoint)
        ids["webhook_endpoint_id"] = endpoint.id
    with get_store().fs.open(get_store()._path("archive"), "wb") as archive:
        archive.write(b"tar")
    return ids


def routes_with_ids() -> list[tuple[str, str]]:
    from app.main import create_app

    paths = create_app().openapi()["paths"]
    every = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [(method, path) for method, path in every if "{" in path and not path.startswith("/v1/api_keys")]


def test_every_owned_route_is_known():
    assert len(routes_with_ids()) >= 10


@pytest.mark.parametrize("method_and_path", routes_with_ids(), ids=" ".join)
def test_anothers_is_not_there(method_and_path, made, ada, bob, admin):
    method, path = method_and_path
    [name] = re.findall(r"{(\w+)", path)
    before = rows()

    another = bob(method, path.replace(f"{{{name}}}", made[name]))
    nothing = bob(method, path.replace(f"{{{name}}}", "absent"))

    assert (another.status_code, nothing.status_code) == (404, 404), another.text
    assert another.json() == _with(nothing.json(), made[name])
    assert rows() == before
    mine = ada(method, path.replace(f"{{{name}}}", made[name]))
    theirs = admin(method, path.replace(f"{{{name}}}", made[name]))
    assert mine.status_code != 404
    assert theirs.status_code != 404 or method == "DELETE"  # gone with the first


def _with(body: dict, found: str) -> dict:
    error = body["error"]
    return {"error": {**error, "message": error["message"].replace("absent", found)}}


def rows() -> list[tuple[str, str]]:
    with transaction(read_only=True) as session:
        return [tuple(row) for row in session.execute(select(Job.id, Job.state))]


def test_lists_hold_ones_own_and_go_on_after_ones_own(made, ada, bob, admin):
    for path, name in (("/v1/files", "file_id"), ("/v1/fine_tuning/jobs", "job_id"), ("/v1/models", "model")):
        seen = {who: [row["id"] for row in request("GET", path).json()["data"]]
                for who, request in (("ada", ada), ("bob", bob), ("admin", admin))}  # fmt: skip
        assert made[name] in seen["ada"]
        assert made[name] in seen["admin"]
        assert made[name] not in seen["bob"]
    for path, name in (("/v1/files", "file_id"), ("/v1/fine_tuning/jobs", "job_id")):
        assert ada("GET", path, params={"after": made[name]}).status_code == 200
        assert bob("GET", path, params={"after": made[name]}).status_code == 404


def test_a_job_cannot_be_made_of_anothers_file(made, bob):
    mine = upload(bob)

    for field in ("training_file", "validation_file"):
        body = {"model": MODEL, "training_file": mine, "method": reinforcement(), field: made["file_id"]}
        response = bob("POST", "/v1/fine_tuning/jobs", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "file_not_found")
        assert response.json()["error"]["param"] == field


def test_two_owners_may_use_one_idempotency_key(ada, bob, admin):
    key = {"idempotency-key": "monday"}

    first = {who: create(request, upload(request), headers=key).json()["id"] for who, request in
             (("ada", ada), ("bob", bob), ("admin", admin))}  # fmt: skip

    assert len(set(first.values())) == 3


def test_a_retry_is_answered_with_ones_own_job_alone(ada, admin):
    file_id = upload(ada)
    job = create(ada, file_id).json()["id"]

    again = {"x-stainless-retry-count": "1"}
    assert create(ada, file_id, headers=again).json()["id"] == job
    assert create(admin, file_id, headers=again).json()["id"] != job  # an admin may see it, and has not made it


def test_keys_of_one_owner_share(client, made, ada):
    colleague = _as(client, "ada", Scope.READ)

    assert colleague("GET", f"/v1/fine_tuning/jobs/{made['job_id']}").status_code == 200
    assert colleague("GET", f"/v1/files/{made['file_id']}").status_code == 200


def test_what_was_made_without_a_key_is_the_default_owners(client, create):
    job = create()["id"]

    default, bob = _as(client, "default"), _as(client, "bob")

    assert default("GET", f"/v1/fine_tuning/jobs/{job}").status_code == 200
    assert bob("GET", f"/v1/fine_tuning/jobs/{job}").status_code == 404


def test_the_filter_holds_for_every_kind_of_query(made):
    statements = (
        lambda session: session.get(Job, made["job_id"]),
        lambda session: session.scalar(select(Job.id).where(Job.id == made["job_id"])),
        lambda session: session.get(Checkpoint, made["checkpoint"]),
        lambda session: session.scalar(select(Checkpoint.id).join(Job, Job.id == Checkpoint.job_id)),
        lambda session: jobs.enter(session, made["job_id"], JobState.CANCELLED),
    )

    for statement in statements[:-1]:
        for owner, found in (("ada", True), ("bob", False)):
            with acting_for(Caller(owner, Scope.WRITE)), transaction(read_only=True) as session:
                assert bool(statement(session)) is found
    with (
        acting_for(Caller("bob", Scope.WRITE)), transaction() as session,
        pytest.raises(jobs.NotFound),
    ):  # fmt: skip
        statements[-1](session)


def test_the_queue_counts_everyones_jobs_and_names_only_ones_own(ada, bob, admin):
    first, second = create(ada, upload(ada)).json()["id"], create(bob, upload(bob)).json()["id"]

    seen = {who: request("GET", "/v1/queue").json() for who, request in (("bob", bob), ("admin", admin))}

    assert [queue["num_queued"] for queue in seen.values()] == [2, 2]
    assert [(job["id"], job["position"]) for job in seen["bob"]["data"]] == [(second, 2)]
    assert [(job["id"], job["position"]) for job in seen["admin"]["data"]] == [(first, 1), (second, 2)]
