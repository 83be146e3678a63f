import threading

import pytest
from sqlalchemy import func, select

from app import db
from app.errors import BadRequest
from app.files import service as files
from app.files.models import File
from app.jobs import creation, service
from app.jobs.creation import Repeat, create, fingerprint
from app.jobs.models import Event, Job
from app.jobs.schemas import JobRequest
from app.storage import get_store
from tests.app.conftest import MODEL, reinforcement, sums

RETRY = {"x-stainless-retry-count": "1"}


def count(row: type) -> int:
    with db.transaction(read_only=True) as session:
        return session.scalars(select(func.count()).select_from(row)).one()


def test_a_create_that_the_sdk_sends_again_is_answered_with_the_first_job(client, body):
    first = client.post("/v1/fine_tuning/jobs", json=body)
    again = client.post("/v1/fine_tuning/jobs", json=body, headers=RETRY)

    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert (count(Job), count(Event)) == (1, 1)


def test_a_retry_whose_first_try_never_arrived_creates_the_job(client, body):
    response = client.post("/v1/fine_tuning/jobs", json=body, headers=RETRY)

    assert response.status_code == 200
    assert count(Job) == 1


def test_the_same_body_without_a_retry_is_another_job(client, body):
    ids = {client.post("/v1/fine_tuning/jobs", json=body).json()["id"] for _ in range(3)}

    assert len(ids) == 3


def test_a_retry_of_another_body_is_another_job(client, body):
    client.post("/v1/fine_tuning/jobs", json=body)
    other = client.post("/v1/fine_tuning/jobs", json=body | {"seed": 1}, headers=RETRY)

    assert "idempotent-replayed" not in other.headers
    assert count(Job) == 2


def test_after_ten_minutes_a_retry_is_a_new_create(client, body):
    client.post("/v1/fine_tuning/jobs", json=body)
    with db.transaction() as session:
        session.scalars(select(Job)).one().created_at -= 601

    client.post("/v1/fine_tuning/jobs", json=body, headers=RETRY)

    assert count(Job) == 2


def test_an_idempotency_key_names_one_job_for_ever(client, body, upload):
    key = {"Idempotency-Key": "mine"}
    first = client.post("/v1/fine_tuning/jobs", json=body, headers=key).json()
    with db.transaction() as session:
        session.scalars(select(Job)).one().created_at -= 1e6

    again = client.post("/v1/fine_tuning/jobs", json=body, headers=key)
    unlike = client.post("/v1/fine_tuning/jobs", json=body | {"seed": 5}, headers=key)
    other = client.post("/v1/fine_tuning/jobs", json=body, headers={"Idempotency-Key": "other"})

    assert again.json()["id"] == first["id"]
    assert (unlike.status_code, unlike.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert other.json()["id"] != first["id"]
    assert client.post("/v1/fine_tuning/jobs", json=body, headers={"Idempotency-Key": "x" * 256}).status_code == 400


def test_a_retry_is_answered_even_if_the_job_could_not_be_created_any_more(client, body):
    job = client.post("/v1/fine_tuning/jobs", json=body).json()
    client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")
    client.delete(f"/v1/files/{body['training_file']}")

    again = client.post("/v1/fine_tuning/jobs", json=body, headers=RETRY)

    assert again.json()["id"] == job["id"]


@pytest.fixture
def request_of(either_database, tmp_path):
    """A create of an uploaded file."""
    (tmp_path / "sums.jsonl").write_bytes(sums(16))
    get_store().put("files/file-1.jsonl", tmp_path / "sums.jsonl")
    with db.transaction() as session:
        session.add(
            File(
                id="file-1", filename="sums.jsonl", purpose="fine-tune", num_bytes=1, num_rows=16,
                sha256="0" * 64, key="files/file-1.jsonl",
            )
        )  # fmt: skip
    return JobRequest.model_validate({"model": MODEL, "training_file": "file-1", "method": reinforcement()})


@pytest.mark.parametrize(("key", "retried"), [("mine", False), (None, True)])
def test_of_creates_that_are_one_and_come_at_once_one_makes_a_job(request_of, key, retried):
    repeat = Repeat(fingerprint(request_of), key, retried)
    made: list[tuple[str, bool]] = []

    def run() -> None:
        job, is_new = create(request_of, repeat)
        made.append((job.id, is_new))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 6
    assert len({job_id for job_id, _ in made}) == 1
    assert [is_new for _, is_new in made].count(True) == 1
    assert count(Job) == 1


def test_a_slow_first_try_that_its_retry_has_overtaken_makes_no_second_job(request_of, monkeypatch):
    first, retry = (Repeat(fingerprint(request_of), None, retried) for retried in (False, True))
    resolve, overtaken = creation.resolve, []

    def slowly(*given, **more):
        if not overtaken:
            overtaken.append(None)
            overtaken[0] = create(request_of, retry)[0].id
        return resolve(*given, **more)

    monkeypatch.setattr(creation, "resolve", slowly)

    job, is_new = create(request_of, first)

    assert (job.id, is_new) == (overtaken[0], False)
    assert count(Job) == 1


def test_a_file_that_is_deleted_while_a_job_is_made_of_it_is_refused_to_one_of_the_two(request_of, monkeypatch):
    resolved, resolve = threading.Barrier(2), creation.resolve
    deleted, refusals = [], []

    def meet(*given, **more):
        plan = resolve(*given, **more)
        resolved.wait(10)
        return plan

    def remove() -> None:
        resolved.wait(10)
        try:
            with db.transaction() as session:
                deleted.append(files.remove(session, "file-1"))
        except BadRequest as error:
            refusals.append(error.code)

    monkeypatch.setattr(creation, "resolve", meet)
    remover = threading.Thread(target=remove)
    remover.start()
    try:
        create(request_of, Repeat("f", None, False))
    except BadRequest as error:
        refusals.append(error.code)
    remover.join()

    assert refusals == (["file_not_found"] if deleted else ["file_in_use"])
    assert (count(Job), count(File)) == ((0, 0) if deleted else (1, 1))


def test_a_create_that_fails_at_its_end_leaves_nothing(request_of, monkeypatch):
    monkeypatch.setattr(service, "log", lambda *given, **more: (_ for _ in ()).throw(RuntimeError("no")))

    with pytest.raises(RuntimeError):
        create(request_of, Repeat("f", None, False))

    assert (count(Job), count(Event)) == (0, 0)
