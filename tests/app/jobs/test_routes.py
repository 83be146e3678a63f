import gzip
import hashlib
import json
import time
from urllib.parse import quote

import pytest
from sqlalchemy import func, select

from app import broker, db
from app.jobs import service
from app.jobs.models import Job
from app.jobs.service import Artifact, Lease
from app.storage import get_store
from tests.app.conftest import GRADER, MODEL, reinforcement
from tests.live import free_port

JOBS = "/v1/fine_tuning/jobs"
HYPER = "method.reinforcement.hyperparameters"
GRADING = "method.reinforcement.grader"


def start(job_id: str) -> Lease:
    with db.transaction() as session:
        return service.claim(session, job_id, "test")


def publish(lease: Lease, step: int, tmp_path, **metrics: float) -> bytes:
    """Publish an archive as a worker does; returns its bytes."""
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(gzip.compress(f"adapter of step {step}".encode()))
    key = f"jobs/{lease.job_id}/attempts/{lease.attempt}/step-{step}.tar.gz"
    get_store().put(key, archive)
    content = archive.read_bytes()
    artifact = Artifact(key, hashlib.sha256(content).hexdigest(), len(content))
    with db.transaction() as session:
        service.publish(session, lease, step, artifact, metrics)
    return content


def record(lease: Lease, step: int, **values: float) -> None:
    with db.transaction() as session:
        service.record_step(session, lease, step, {name.replace("__", "/"): value for name, value in values.items()})


def test_a_job_is_openai_s_object_and_ours(client, create, settings):
    job = create(suffix="sums", seed=7, metadata={"who": "me"}, rl={"max_steps": 12})

    assert job["id"].startswith("ftjob-")
    assert abs(job["created_at"] - time.time()) < 60
    fixed = {
        "object": "fine_tuning.job",
        "model": MODEL,
        "organization_id": "local",
        "status": "queued",
        "validation_file": None,
        "fine_tuned_model": None,
        "finished_at": None,
        "estimated_finish": None,
        "trained_tokens": None,
        "result_files": [],
        "seed": 7,
        "hyperparameters": {"batch_size": 8, "n_epochs": 6, "learning_rate_multiplier": 1.0},
        "metadata": {"who": "me"},
        "integrations": [],
        "error": None,
        "suffix": "sums",
        "phase": None,
        "progress": {"step": 0, "total_steps": 12, "percent": 0.0},
        "attempt": 0,
        "warnings": [],
    }
    assert {name: job[name] for name in fixed} == fixed
    assert job["method"]["reinforcement"]["grader"] == GRADER
    assert client.get(f"{JOBS}/{job['id']}").json() == job


def test_nothing_of_a_job_tells_where_things_lie_on_the_server(client, create, settings):
    job = create()

    text = client.get(f"{JOBS}/{job['id']}").text
    assert job["resolved_config"]["model"] == {
        "id": MODEL,
        "revision": None,
        "hub_id": f"HuggingFaceTB/{MODEL}",
        "quantization": "nvfp4",
        "quantization_method": "auto",
    }
    assert job["resolved_config"]["data"] == {"shuffle": True}
    assert job["resolved_config"]["num_steps"] == 100
    for secret in (str(settings.home), "files/", "package:", ".gguf"):
        assert secret not in text


def test_a_created_job_is_rung_for_after_its_commit(client, create, monkeypatch):
    rung = []

    def ring(job_id: str) -> bool:
        with db.transaction(read_only=True) as session:
            rung.append(service.get(session, job_id).state)
        return True

    monkeypatch.setattr(broker, "ring", ring)

    create()

    assert rung == ["queued"]


def test_without_a_broker_a_create_is_answered_all_the_same(client, create, settings, monkeypatch):
    monkeypatch.setenv("QERL_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    from app.settings import get_settings

    get_settings.cache_clear()
    broker.get_celery.cache_clear()

    job = create()

    assert job["status"] == "queued"
    with db.transaction(read_only=True) as session:
        assert service.unrung(session, older_than_s=1e9) == [job["id"]]


@pytest.mark.parametrize(
    ("changes", "param", "code", "message"),
    [
        ({"model": "gpt-4o"}, "model", "model_not_found", f"use one of {MODEL}"),
        ({"model": None}, "model", "invalid_type", "valid string"),
        ({"training_file": "file-none"}, "training_file", "file_not_found", "POST /v1/files"),
        ({"validation_file": "file-none"}, "validation_file", "file_not_found", "file-none"),
        ({"suffix": ""}, "suffix", "invalid_value", "at least 1"),
        ({"suffix": "x" * 65}, "suffix", "invalid_value", "at most 64"),
        ({"suffix": "a:b"}, "suffix", "invalid_value", "pattern"),
        ({"seed": -1}, "seed", "invalid_value", "greater than or equal to 0, not -1"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value", "at most 16"),
        ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 65}", "invalid_value", "at most 64"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value", "at most 512"),
        ({"metadata": {"k": "a\0b"}}, "metadata.k", "invalid_value", "no NUL character"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_type", "valid string, not 1"),
        ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters", "unsupported_parameter", HYPER.rpartition(".")[0]),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "unsupported_parameter", "leave it out"),
        ({"importance": 1}, "importance", "unknown_parameter", "unknown key; known are hyperparameters, "),
        ({"method": {"type": "supervised"}}, "method.type", "unsupported_method", "only 'reinforcement'"),
        ({"method": {"type": "dpo", "dpo": {}}}, "method.type", "unsupported_method", "only 'reinforcement'"),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement", "missing_required_parameter", "required"),
        (
            {"method": reinforcement(response_format={"type": "json_schema"})},
            "method.reinforcement.response_format",
            "unsupported_parameter",
            "free text",
        ),
        ({"method": reinforcement(grader=None)}, GRADING, "invalid_type", "an object"),
        ({"method": reinforcement(grader={})}, f"{GRADING}.type", "missing_required_parameter", "required"),
        (
            {"method": reinforcement(grader={"type": "sting_check"})},
            f"{GRADING}.type",
            "invalid_value",
            "'sting_check'; known are 'string_check'",
        ),
        (
            {"method": reinforcement(grader=GRADER | {"refference": "x"})},
            f"{GRADING}.refference",
            "unknown_parameter",
            "did you mean 'reference'?",
        ),
        (
            {"method": reinforcement(grader=GRADER | {"operation": "is"})},
            f"{GRADING}.operation",
            "invalid_value",
            "'eq'",
        ),
        (
            {"method": reinforcement(grader=GRADER | {"input": "\ud800"})},
            f"{GRADING}.input",
            "invalid_value",
            "unpaired surrogate",
        ),
        (
            {"method": reinforcement(grader=GRADER | {"reference": "{{ item.anwser }}"})},
            f"{GRADING}.reference",
            "invalid_grader",
            "line 1 of the training_file has no item.anwser",
        ),
        (
            {"method": reinforcement(grader=GRADER | {"reference": "{{ itm.answer }}"})},
            f"{GRADING}.reference",
            "invalid_grader",
            "itm",
        ),
        (
            {"method": reinforcement(grader={"type": "python", "source": "def grade(x:"})},
            f"{GRADING}.source",
            "invalid_grader",
            "line 1",
        ),
        (
            {"method": reinforcement(hyperparameters={"batch_size": 17})},
            f"{HYPER}.batch_size",
            "invalid_value",
            "17 is above the 16 rows",
        ),
        ({"method": reinforcement(hyperparameters={"batch_size": 0})}, f"{HYPER}.batch_size", "invalid_value", "1"),
        ({"method": reinforcement(hyperparameters={"n_epochs": "many"})}, f"{HYPER}.n_epochs", "invalid_type", "int"),
        (
            {"method": reinforcement(hyperparameters={"compute_multiplier": 2})},
            f"{HYPER}.compute_multiplier",
            "unsupported_parameter",
            "rl.group_size",
        ),
        (
            {"method": reinforcement(hyperparameters={"reasoning_effort": "high"})},
            f"{HYPER}.reasoning_effort",
            "invalid_value",
            "no levels",
        ),
        ({"rl": {"group_size": 1}}, "rl.group_size", "invalid_value", "a group of one has no spread"),
        ({"rl": {"group_size": "8"}}, "rl.group_size", "invalid_type", "integer"),
        ({"rl": {"group_size": True}}, "rl.group_size", "invalid_type", "integer"),
        ({"rl": {"grop_size": 8}}, "rl.grop_size", "unknown_parameter", "did you mean 'group_size'?"),
        ({"rl": {"max_prompt_tokens": 8000}}, "rl.max_prompt_tokens", "invalid_value", "8192 tokens"),
        ({"rl": {"noise": {"num_stage": 3}}}, "rl.noise.num_stage", "unknown_parameter", "'num_stages'"),
        ({"rl": {"noise": {"sigma_start": 1e-5}}}, "rl.noise", "invalid_value", "sigma_end 0.0005 is above"),
        ({"lora": {"rnk": 8}}, "lora.rnk", "unknown_parameter", "'rank'"),
        ({"lora": {"rank": 512}}, "lora.rank", "invalid_value", "above the 256"),
        ({"lora": {"target_modules": ["q"]}}, "lora.target_modules.0", "invalid_value", "'q_proj'"),
        ({"quantization": {"format": "int4"}}, "quantization.format", "invalid_value", "'nvfp4' or 'none'"),
    ],
)
def test_a_bad_create_names_the_field_and_a_remedy_and_leaves_nothing(client, body, changes, param, code, message):
    content = json.dumps(body | changes).encode()  # in ASCII, surrogates too

    response = client.post(JOBS, content=content, headers={"content-type": "application/json"})

    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert message in error["message"]
    with db.transaction(read_only=True) as session:
        assert session.scalars(select(func.count()).select_from(Job)).one() == 0


def test_infinity_and_nan_are_no_numbers(client, body):
    for text in ("Infinity", "NaN", "1e400"):
        response = client.post(
            JOBS,
            content=f'{{"model": "x", "training_file": "f", "rl": {{"learning_rate": {text}}}}}'.encode(),
            headers={"content-type": "application/json"},
        )

        assert "rl.learning_rate" in [error["param"] for error in response.json()["error"]["errors"]]


def test_a_grader_is_held_against_the_validation_file_too(client, body, upload):
    other = upload(5, answer=None)
    without = upload(2)
    response = client.post(JOBS, json=body | {"validation_file": other})
    assert response.status_code == 200

    grader = GRADER | {"reference": "{{ item.extra }}"}
    training = upload(3, extra="x")
    response = client.post(
        JOBS,
        json=body | {"training_file": training, "validation_file": without, "method": reinforcement(grader=grader)},
    )

    assert response.json()["error"]["param"] == f"{GRADING}.reference"
    assert "line 1 of the validation_file has no item.extra" in response.json()["error"]["message"]


def test_jobs_are_listed_newest_first_and_by_metadata(client, create):
    ids = [create(metadata=pairs)["id"] for pairs in (None, {"a": "1"}, {"a": "1", "b c": "x"}, {"a": ""})]

    def listed(query: str = "") -> list[str]:
        return [job["id"] for job in client.get(f"{JOBS}{query}").json()["data"]]

    assert listed() == ids[::-1]
    assert listed(f"?limit=2&after={ids[3]}") == [ids[2], ids[1]]
    assert listed("?metadata[a]=1") == [ids[2], ids[1]]
    assert listed("?metadata[a]=1&metadata[b%20c]=x") == [ids[2]]
    assert listed("?metadata[a]=") == [ids[3]]
    assert listed("?metadata=null") == [ids[0]]
    assert client.get(f"{JOBS}?metadata=x").json()["error"]["param"] == "metadata"
    assert client.get(f'{JOBS}?metadata[a"]=x').json()["error"]["code"] == "invalid_value"


def test_a_job_is_cancelled_once(client, create):
    job = create()

    cancelled = client.post(f"{JOBS}/{job['id']}/cancel").json()
    again = client.post(f"{JOBS}/{job['id']}/cancel")

    assert cancelled["status"] == "cancelled"
    assert cancelled["finished_at"] >= job["created_at"]
    assert (again.status_code, again.json()["error"]["code"]) == (400, "job_conflict")
    assert "is cancelled" in again.json()["error"]["message"]


def test_a_running_job_shows_how_far_it_is(client, create):
    job = create(rl={"max_steps": 8})
    lease = start(job["id"])
    with db.transaction() as session:
        service.enter_phase(session, lease, "training")
        values = {"reward/mean": 0.25, "tokens/trained": 30.0}
        service.record_step(session, lease, 2, values, seconds_left=60.0)

    shown = client.get(f"{JOBS}/{job['id']}").json()

    assert (shown["status"], shown["phase"], shown["attempt"]) == ("running", "training", 1)
    assert shown["progress"] == {"step": 2, "total_steps": 8, "percent": 25.0}
    assert shown["trained_tokens"] == 30
    assert 30 < shown["estimated_finish"] - time.time() < 90


def test_a_failed_job_tells_why(client, create):
    job = create()
    with db.transaction() as session:
        service.fail(session, service.claim(session, job["id"], "test"), "bad_checkpoint", "lm_head.weight is missing")

    shown = client.get(f"{JOBS}/{job['id']}").json()

    assert shown["status"] == "failed"
    assert shown["error"] == {"code": "bad_checkpoint", "message": "lm_head.weight is missing", "param": None}
    assert shown["fine_tuned_model"] is None


def test_events_are_newest_first_and_those_of_steps_carry_metrics(client, create):
    job = create()
    lease = start(job["id"])
    for step in (1, 2):
        record(lease, step, reward__mean=0.5 * step)

    events = client.get(f"{JOBS}/{job['id']}/events").json()["data"]

    assert [event["message"] for event in events] == [
        "Step 2: train_reward_mean=1.0000",
        "Step 1: train_reward_mean=0.5000",
        "Attempt 1 started.",
        f"Created fine-tuning job: {job['id']}",
    ]
    assert (events[0]["type"], events[0]["level"], events[3]["type"]) == ("metrics", "info", "message")
    assert events[0]["data"] == {"step": 2, "train_reward_mean": 1.0, "reward/mean": 1.0}
    page = client.get(f"{JOBS}/{job['id']}/events?limit=2&after={events[1]['id']}").json()
    assert page["data"] == events[2:]
    assert page["has_more"] is False


def test_metrics_are_oldest_first_and_go_on_from_a_step(client, create):
    job = create()
    lease = start(job["id"])
    for step in range(5):
        record(lease, step, reward__mean=step / 10)

    listed = client.get(f"{JOBS}/{job['id']}/metrics").json()
    later = client.get(f"{JOBS}/{job['id']}/metrics?since_step=2&limit=1").json()

    assert listed["object"] == "list"
    assert [(row["step"], row["reward/mean"], row["attempt"]) for row in listed["data"]] == [
        (step, step / 10, 1) for step in range(5)
    ]
    assert [row["step"] for row in later["data"]] == [3]
    assert (listed["has_more"], later["has_more"]) == (False, True)
    assert client.get(f"{JOBS}/none/metrics").status_code == 404


def test_checkpoints_are_newest_first_with_openai_s_names(client, create, tmp_path):
    job = create(suffix="s")
    lease = start(job["id"])
    publish(lease, 2, tmp_path)
    publish(lease, 4, tmp_path, **{"loss": 0.5, "reward/mean": 0.75})

    newest, oldest = client.get(f"{JOBS}/{job['id']}/checkpoints").json()["data"]

    name = f"ft:{MODEL}:local:s:{job['id'][-8:]}"
    assert newest["id"].startswith("ftckpt_")
    assert (newest["step_number"], oldest["step_number"]) == (4, 2)
    assert newest["fine_tuned_model_checkpoint"] == f"{name}:ckpt-step-4"
    assert newest["fine_tuning_job_id"] == job["id"]
    assert newest["metrics"] == {"step": 4, "train_loss": 0.5, "reward": 0.75, "loss": 0.5, "reward/mean": 0.75}


def test_the_newest_adapter_is_downloaded_whole_and_has_a_name_and_a_hash(client, create, tmp_path):
    job = create()
    lease = start(job["id"])
    publish(lease, 2, tmp_path)
    content = publish(lease, 4, tmp_path)

    response = client.get(f"{JOBS}/{job['id']}/adapter")

    assert response.content == content
    assert response.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
    assert response.headers["content-length"] == str(len(content))
    assert response.headers["content-disposition"] == f'attachment; filename="{job["id"]}-step-4.tar.gz"'
    assert response.headers["content-type"] == "application/gzip"
    known = {"if-none-match": response.headers["etag"]}
    assert client.get(f"{JOBS}/{job['id']}/adapter", headers=known).status_code == 304


def test_a_checkpoint_s_adapter_is_downloaded_by_id_or_by_name(client, create, tmp_path):
    job = create()
    lease = start(job["id"])
    content = publish(lease, 2, tmp_path)
    publish(lease, 4, tmp_path)
    checkpoint = client.get(f"{JOBS}/{job['id']}/checkpoints").json()["data"][1]
    name = checkpoint["fine_tuned_model_checkpoint"]

    for path in (checkpoint["id"], name, quote(name, safe="")):
        assert client.get(f"/v1/fine_tuning/checkpoints/{path}/adapter").content == content
    for path in ("ftckpt_none", f"{name}0", f"{name}x", "ft:x:y:z:ckpt-step-2", f"{name[:-1]}²"):
        assert client.get(f"/v1/fine_tuning/checkpoints/{path}/adapter").status_code == 404


def test_a_job_without_an_adapter_says_so(client, create):
    job = create()

    response = client.get(f"{JOBS}/{job['id']}/adapter")

    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_not_found")
    assert response.json()["error"]["message"] == f"The job {job['id']} is queued and has published no adapter yet."
    assert client.get(f"{JOBS}/none/adapter").json()["error"]["code"] == "not_found"


def test_a_job_is_paused_and_resumed_over_http(client, create, monkeypatch):
    rung = []
    job = create(priority=3, limits={"max_gpu_seconds": 60})
    assert (job["priority"], job["limits"]) == (3, {"max_gpu_seconds": 60.0, "on_limit": "pause"})
    assert job["queue"] == {"position": 1, "reason": "It waits for a worker, and is next."}
    assert (job["usage"], job["failure"], job["retried_from"]) == ({"gpu_seconds": 0.0, "tokens": 0}, None, None)

    paused = client.post(f"{JOBS}/{job['id']}/pause").json()
    assert (paused["status"], paused["queue"]["position"]) == ("paused", None)
    assert "resume it" in paused["queue"]["reason"]
    monkeypatch.setattr(broker, "ring", rung.append)
    resumed = client.post(f"{JOBS}/{job['id']}/resume", json={"limits": {"max_wall_seconds": 9, "on_limit": "fail"}})

    assert resumed.json()["status"] == "queued"
    assert resumed.json()["limits"] == {"max_wall_seconds": 9.0, "on_limit": "fail"}
    assert client.get(f"{JOBS}/{job['id']}").json() == resumed.json()
    assert client.get(JOBS).json()["data"] == [resumed.json()]
    assert rung == [job["id"]]
    again = client.post(f"{JOBS}/{job['id']}/resume")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "job_conflict")


def test_a_failed_job_is_retried_as_a_new_one_and_a_repeated_retry_makes_no_second(client, create):
    job = create(suffix="sums", metadata={"a": "b"}, priority=2)
    early = client.post(f"{JOBS}/{job['id']}/retry")
    assert (early.status_code, early.json()["error"]["code"]) == (400, "job_conflict")
    lease = start(job["id"])
    with db.transaction() as session:
        service.fail(session, lease, "training_diverged", "The loss is not finite.")
    failed = client.get(f"{JOBS}/{job['id']}").json()
    assert failed["failure"] == {
        "category": "training", "retryable": False, "hint": "Lower rl.learning_rate, or rl.max_grad_norm."
    }  # fmt: skip

    new = client.post(f"{JOBS}/{job['id']}/retry").json()
    repeated = client.post(f"{JOBS}/{job['id']}/retry", headers={"x-stainless-retry-count": "1"})
    wanted = client.post(f"{JOBS}/{job['id']}/retry").json()

    assert (new["status"], new["retried_from"], new["attempt"]) == ("queued", job["id"], 0)
    same = ("model", "seed", "method", "metadata", "suffix", "training_file", "resolved_config", "priority")
    assert {name: new[name] for name in same} == {name: job[name] for name in same}
    assert (repeated.json()["id"], repeated.headers["idempotent-replayed"]) == (new["id"], "true")
    assert wanted["id"] not in (new["id"], job["id"])


def test_a_retry_whose_file_is_gone_says_so(client, create):
    job = create()
    client.post(f"{JOBS}/{job['id']}/cancel")
    assert client.delete(f"/v1/files/{job['training_file']}").status_code == 200

    error = client.post(f"{JOBS}/{job['id']}/retry").json()["error"]

    assert (error["param"], error["code"]) == ("training_file", "file_not_found")
    assert len(client.get(JOBS).json()["data"]) == 1


def test_a_deleted_job_is_gone_with_its_archives(client, create, tmp_path):
    job = create()
    assert client.delete(f"{JOBS}/{job['id']}").json()["error"]["code"] == "job_conflict"
    lease = start(job["id"])
    publish(lease, 1, tmp_path)
    with db.transaction() as session:
        service.succeed(session, lease)

    assert client.delete(f"{JOBS}/{job['id']}").json() == {
        "id": job["id"], "object": "fine_tuning.job", "deleted": True
    }  # fmt: skip

    assert client.get(f"{JOBS}/{job['id']}").status_code == 404
    assert client.delete(f"{JOBS}/{job['id']}").status_code == 404
    assert not get_store().exists(f"jobs/{job['id']}/attempts/1/step-1.tar.gz")


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"limits": {}}, "limits", "max_gpu_seconds or max_wall_seconds"),
        ({"limits": {"max_gpu_seconds": 0}}, "limits.max_gpu_seconds", "greater than 0"),
        ({"limits": {"max_gpu_second": 1}}, "limits.max_gpu_second", "did you mean 'max_gpu_seconds'"),
        ({"limits": {"max_gpu_seconds": 1, "on_limit": "stop"}}, "limits.on_limit", "'pause' or 'fail'"),
        ({"priority": 101}, "priority", "less than or equal to 100"),
        # What TrainConfig alone can see is told in the request's words.
        (
            {"rl": {"overlong": {"buffer_tokens": 600}}},
            "rl.overlong.buffer_tokens",
            "below rl.max_completion_tokens 512",
        ),
        ({"rl": {"loss": "dr_grpo"}}, "rl.loss", "rl.loss dr_grpo leaves advantages unscaled: set rl.scale_by_std"),
    ],
)
def test_settings_that_do_not_go_together_name_the_request_s_fields(client, body, changes, param, message):
    response = client.post(JOBS, json=body | changes)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def test_the_queue_has_all_that_wait_in_the_order_of_their_turns(client, create):
    running, first, urgent = create()["id"], create()["id"], create(priority=1)["id"]
    start(running)
    paused = create()["id"]
    client.post(f"{JOBS}/{paused}/pause")

    queue = client.get("/v1/queue").json()

    assert (queue["object"], queue["num_queued"], queue["num_running"], queue["has_more"]) == ("queue", 2, 1, False)
    assert [(job["id"], job["position"], job["priority"]) for job in queue["data"]] == [(urgent, 1, 1), (first, 2, 0)]
    assert client.get("/v1/queue", params={"limit": 1}).json()["has_more"] is True
    assert client.get("/v1/queue", params={"limit": 0}).json()["error"]["param"] == "limit"


def test_a_create_is_validated_without_one_and_estimated_from_the_jobs_before(client, body, create):
    asked = body | {"seed": 5, "rl": {"max_steps": 10}}
    path = f"{JOBS}/validate"

    first = client.post(path, json=asked)
    assert first.status_code == 200
    assert client.get(JOBS).json()["data"] == []
    assert first.json()["estimate"] == {
        "total_steps": 10, "completions": 640, "max_completion_tokens": 640 * 512, "gpu_seconds": None, "from_jobs": 0
    }  # fmt: skip
    job = create(seed=5, rl={"max_steps": 5})
    lease = start(job["id"])
    with db.transaction() as session:
        session.get_one(Job, job["id"]).gpu_seconds = 30.0
        service.succeed(session, lease)
    second = client.post(path, json=asked).json()
    third = create(seed=5, rl={"max_steps": 10})

    assert second["estimate"]["from_jobs"] == 1
    assert second["estimate"]["gpu_seconds"] == pytest.approx(60.0, abs=5)
    shared = ("model", "method", "hyperparameters", "resolved_config", "warnings")
    assert {name: second[name] for name in shared} == {name: third[name] for name in shared}


@pytest.mark.parametrize(
    "changes", [{"model": "gpt-4o"}, {"rl": {"group_size": 1}}, {"training_file": "file-none"}, {"lora": {"rank": 512}}]
)
def test_what_a_create_refuses_its_validation_refuses_with_the_same_words(client, body, changes):
    refused, told = client.post(JOBS, json=body | changes), client.post(f"{JOBS}/validate", json=body | changes)

    assert refused.status_code == told.status_code == 400
    assert refused.json() == told.json()
