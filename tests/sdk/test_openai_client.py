"""The stock `openai` client against a live server; nothing is changed but `base_url`. No broker runs."""

import hashlib
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from io import BytesIO

import httpx2
import openai
import pytest
import uvicorn
from openai import OpenAI

from app import db
from app.jobs import service
from app.jobs.service import Artifact
from app.main import create_app
from app.migrate import upgrade
from app.settings import Settings
from app.storage import get_store
from tests.app.conftest import GRADER, MODEL, reinforcement, sums
from tests.live import free_port, settings_of_process, wait_until


@pytest.fixture(scope="module")
def base_url(tmp_path_factory) -> Iterator[str]:
    """Where a live server listens."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    made = Settings(home=tmp_path_factory.mktemp("home"), redis_url=nowhere, sweep_s=60.0)
    with settings_of_process(made) as settings, socket.socket() as listener:
        upgrade(settings.database_url)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        server = uvicorn.Server(uvicorn.Config(create_app(), log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started, what="the server")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def client(base_url) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="anything") as client:
        yield client


@pytest.fixture
def file_id(client) -> str:
    return client.files.create(file=("sums.jsonl", sums(16)), purpose="fine-tune").id


def create(client: OpenAI, file_id: str, **more):
    return client.fine_tuning.jobs.create(model=MODEL, training_file=file_id, method=reinforcement(), **more)


def test_a_file_goes_up_is_processed_and_comes_down(client, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(sums(20))

    made = client.files.create(file=path, purpose="fine-tune")
    processed = client.files.wait_for_processing(made.id, max_wait_seconds=5)

    assert (processed.status, processed.filename, processed.bytes) == (
        "processed",
        "sums.jsonl",
        len(path.read_bytes()),
    )
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == path.read_bytes()
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert (caught.value.code, caught.value.param) == ("not_found", "file_id")


def test_lists_are_walked_page_by_page(client):
    ids = [client.files.create(file=("a.jsonl", sums(1)), purpose="fine-tune").id for _ in range(7)]

    walked = [file.id for file in client.files.list(limit=3, purpose="fine-tune")]
    oldest_first = [file.id for file in client.files.list(limit=2, order="asc", after=ids[3])]

    assert walked[:7] == ids[::-1]
    assert len(walked) == len(set(walked))
    assert oldest_first == ids[4:]


def test_a_bad_file_is_a_bad_request_that_lists_its_lines(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("bad.jsonl", sums(1) + b"{}\nno json\n"), purpose="fine-tune")

    error = caught.value
    assert (error.status_code, error.code, error.param, error.type) == (
        400,
        "invalid_file",
        "file",
        "invalid_request_error",
    )
    assert [fault["line"] for fault in error.body["errors"]] == [2, 3]
    assert "Line 2" in error.message
    assert error.request_id.startswith("req_")


def test_a_file_above_the_limit_is_told_so_before_it_is_sent(client, monkeypatch):
    small = Settings.model_construct(max_upload_bytes=100_000)
    monkeypatch.setattr("app.middleware.get_settings", lambda: small)

    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("big.jsonl", b"x" * 30_000_000), purpose="fine-tune")

    assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, "file_too_large", "file")


def test_a_job_is_created_read_listed_and_cancelled(client, file_id):
    began = time.monotonic()
    job = create(
        client,
        file_id,
        suffix="sums",
        seed=3,
        metadata={"who": "sdk"},
        extra_body={"lora": {"rank": 8, "alpha": 16}, "rl": {"group_size": 4, "max_steps": 10}},
    )

    assert time.monotonic() - began < 1.9, "without a broker, a create waits for none"
    assert (job.status, job.seed, job.metadata, job.result_files) == ("queued", 3, {"who": "sdk"}, [])
    assert (job.hyperparameters.batch_size, job.hyperparameters.n_epochs) == (8, 5)
    assert job.method.reinforcement.grader.type == "string_check"
    assert job.method.reinforcement.hyperparameters.compute_multiplier == 1
    extra = job.model_extra
    assert extra["progress"] == {"step": 0, "total_steps": 10, "percent": 0.0}
    assert extra["resolved_config"]["rollout"]["group_size"] == 4
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    assert job.id in [other.id for other in client.fine_tuning.jobs.list(limit=1)]
    assert [other.id for other in client.fine_tuning.jobs.list(metadata={"who": "sdk"})] == [job.id]

    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.cancel(job.id)
    assert (caught.value.code, caught.value.param) == ("job_conflict", "fine_tuning_job_id")
    newest = next(iter(client.fine_tuning.jobs.list_events(job.id, limit=1)))
    assert (newest.message, newest.level, newest.type) == ("The job was cancelled.", "info", "message")


def test_a_job_is_paused_resumed_retried_and_deleted(client, file_id):
    job = create(client, file_id, extra_body={"priority": -5, "limits": {"max_gpu_seconds": 60}})
    assert job.model_extra["queue"]["position"] >= 1

    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.pause(job.id)
    assert caught.value.code == "job_conflict"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    client.fine_tuning.jobs.cancel(job.id)
    again = client.post(f"/fine_tuning/jobs/{job.id}/retry", cast_to=type(job))
    assert (again.status, again.model_extra["retried_from"]) == ("queued", job.id)
    client.delete(f"/fine_tuning/jobs/{job.id}", cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.retrieve(job.id)
    client.fine_tuning.jobs.cancel(again.id)


def test_openai_s_hyperparameters_may_all_be_auto(client, file_id):
    names = (
        "batch_size",
        "n_epochs",
        "learning_rate_multiplier",
        "compute_multiplier",
        "eval_interval",
        "eval_samples",
    )
    method = reinforcement(hyperparameters=dict.fromkeys(names, "auto"))

    job = client.fine_tuning.jobs.create(model=MODEL, training_file=file_id, validation_file=file_id, method=method)

    assert job.method.reinforcement.hyperparameters.eval_samples == 1
    client.fine_tuning.jobs.cancel(job.id)


def test_a_mistake_in_our_own_block_is_a_bad_request_with_a_suggestion(client, file_id):
    with pytest.raises(openai.BadRequestError, match="did you mean 'group_size'") as caught:
        create(client, file_id, extra_body={"rl": {"groupsize": 4}})

    assert (caught.value.param, caught.value.code) == ("rl.groupsize", "unknown_parameter")


def test_another_method_is_not_supported(client, file_id):
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model=MODEL, training_file=file_id, method={"type": "supervised"})

    assert (caught.value.param, caught.value.code) == ("method.type", "unsupported_method")


class Flaky(httpx2.HTTPTransport):
    """Loses the answer to the first create, as a proxy does that restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_creates = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if request.method == "POST":
            self.num_creates += 1
            if self.num_creates == 1:
                response.close()
                raise httpx2.ReadError("the connection was lost", request=request)
        return response


def test_a_create_whose_answer_was_lost_makes_one_job(base_url, client, file_id):
    flaky = Flaky()
    with OpenAI(base_url=base_url, api_key="x", http_client=httpx2.Client(transport=flaky)) as losing:
        job = create(losing, file_id, metadata={"lost": "once"})

    assert flaky.num_creates == 2
    assert [other.id for other in client.fine_tuning.jobs.list(metadata={"lost": "once"})] == [job.id]


def test_a_finished_job_has_events_metrics_checkpoints_a_model_and_an_adapter(client, file_id, tmp_path):
    job = create(client, file_id, suffix="done")
    content = finish(job.id, tmp_path)

    done = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.trained_tokens, done.error) == ("succeeded", 30, None)
    assert done.fine_tuned_model == f"ft:{MODEL}:local:done:{job.id[-8:]}"
    assert client.models.retrieve(done.fine_tuned_model).owned_by == "local"
    assert {MODEL, done.fine_tuned_model} <= {model.id for model in client.models.list()}
    metrics = [event for event in client.fine_tuning.jobs.list_events(job.id, limit=2) if event.type == "metrics"]
    assert [event.data["train_reward_mean"] for event in metrics] == [0.75, 0.5, 0.25]
    rows = client.get(f"/fine_tuning/jobs/{job.id}/metrics", cast_to=httpx2.Response).json()["data"]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (checkpoint.step_number, checkpoint.metrics.step, checkpoint.metrics.train_loss) == (3, 3, 0.125)
    paths = (
        f"/fine_tuning/jobs/{job.id}/adapter",
        f"/fine_tuning/checkpoints/{checkpoint.id}/adapter",
        f"/fine_tuning/checkpoints/{checkpoint.fine_tuned_model_checkpoint}/adapter",
    )
    for path in paths:
        response = client.get(path, cast_to=httpx2.Response)
        assert response.content == content
        assert response.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'


def finish(job_id: str, tmp_path) -> bytes:
    """Run a job as a worker would; returns its archive."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("adapter/adapter_config.json")
        info.size = 2
        tar.addfile(info, BytesIO(b"{}"))
    content = buffer.getvalue()
    (tmp_path / "a.tar.gz").write_bytes(content)
    get_store().put(f"jobs/{job_id}/a.tar.gz", tmp_path / "a.tar.gz")
    with db.transaction() as session:
        lease = service.claim(session, job_id, "test")
        for step in (1, 2, 3):
            service.record_step(session, lease, step, {"reward/mean": step / 4, "tokens/trained": 10.0})
        artifact = Artifact(f"jobs/{job_id}/a.tar.gz", hashlib.sha256(content).hexdigest(), len(content))
        service.publish(session, lease, 3, artifact, {"loss": 0.125})
        service.succeed(session, lease)
    return content


def test_a_job_without_an_adapter_is_a_not_found(client, file_id):
    job = create(client, file_id)

    with pytest.raises(openai.NotFoundError, match="has published no adapter yet") as caught:
        client.get(f"/fine_tuning/jobs/{job.id}/adapter", cast_to=httpx2.Response)

    assert caught.value.code == "adapter_not_found"


def test_what_does_not_exist_is_a_not_found_with_its_parameter(client):
    calls = {
        "fine_tuning_job_id": lambda: client.fine_tuning.jobs.retrieve("ftjob-none"),
        "after": lambda: client.fine_tuning.jobs.list(after="ftjob-none"),
        "model": lambda: client.models.retrieve("gpt-5"),
    }
    for param, call in calls.items():
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.param == param


def test_a_grader_that_names_a_missing_field_is_refused(client, file_id):
    grader = GRADER | {"reference": "{{ item.anwser }}"}

    with pytest.raises(openai.BadRequestError, match=r"no item\.anwser") as caught:
        client.fine_tuning.jobs.create(model=MODEL, training_file=file_id, method=reinforcement(grader=grader))

    assert caught.value.param == "method.reinforcement.grader.reference"


def test_a_hundred_requests_at_once_are_all_answered(client, file_id):
    """More than there are threads and database connections: none may wait for another that waits for it."""
    statuses = []

    def read() -> None:
        statuses.append(client.with_options(max_retries=0).files.with_raw_response.retrieve(file_id).status_code)

    threads = [threading.Thread(target=read) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert statuses == [200] * 100


def test_a_grader_is_run_and_validated(client):
    grader = {**GRADER, "name": "exact"}

    run = client.fine_tuning.alpha.graders.run(grader=grader, model_sample="4", item={"answer": "4"})

    assert (run.reward, run.metadata.name, run.metadata.errors.other_error) == (1.0, "exact", False)
    assert client.fine_tuning.alpha.graders.validate(grader=grader).grader.name == "exact"
