"""The stock SDK, a real server, Redis, Celery and the real loop on a tiny random model: from upload to download."""

import io
import tarfile

import httpx
import pytest
import torch
from openai import OpenAI
from peft import PeftModel
from safetensors.torch import load_file, save_file

from app.embedded import EmbeddedStack
from app.settings import Settings
from qerl_core.config import ModelConfig
from qerl_core.policy.model import open_base
from tests.live import wait_until
from tests.tiny import make_model, write_rows

VARIETY = "def grade(sample, item):\n    return len(set(sample['output_text'])) / 16\n"
METHOD = {
    "type": "reinforcement",
    "reinforcement": {
        "grader": {"type": "python", "name": "variety", "source": VARIETY},
        "hyperparameters": {"batch_size": 2, "n_epochs": 10},
    },
}
BLOCKS = {
    "lora": {"rank": 4, "alpha": 8},
    "rl": {
        "group_size": 4, "max_prompt_tokens": 64, "max_completion_tokens": 8, "max_steps": 6, "learning_rate": 1e-3,
        "checkpoint_interval": 2, "noise": {"num_stages": 3},
    },
}  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    models = tmp_path / "models.toml"
    folder = make_model(tmp_path / "tiny")
    models.write_text(f'[[models]]\nid = "tiny"\nsource = "{folder}"\nlimits = {{ context_tokens = 512 }}\n')
    return Settings(home=tmp_path / "home", port=0, models_file=models, sweep_s=1.0)


def client_of(stack: EmbeddedStack) -> OpenAI:
    return OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0)


def submit(client: OpenAI, tmp_path, **rl) -> str:
    train = client.files.create(file=write_rows(tmp_path / "train.jsonl", 8), purpose="fine-tune")
    valid = client.files.create(file=write_rows(tmp_path / "valid.jsonl", 3), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=train.id, validation_file=valid.id, suffix="whole", seed=3, method=METHOD,
        extra_body={**BLOCKS, "rl": {**BLOCKS["rl"], **rl}},
    )  # fmt: skip
    return job.id


def metrics_of(client: OpenAI, job_id: str) -> list[dict[str, float]]:
    return client.get(f"/fine_tuning/jobs/{job_id}/metrics", cast_to=httpx.Response).json()["data"]


def ended(client: OpenAI, job_id: str):
    job = client.fine_tuning.jobs.retrieve(job_id)
    return job if job.status in ("succeeded", "failed", "cancelled") else None


def test_a_job_goes_from_upload_to_an_adapter_that_peft_loads_on_the_base(settings, tmp_path):
    with EmbeddedStack(settings) as stack, client_of(stack) as client:
        job_id = submit(client, tmp_path)

        job = wait_until(lambda: ended(client, job_id), what="the end of the job", timeout_s=90)

        assert job.status == "succeeded", job.error
        assert job.fine_tuned_model.startswith("ft:tiny:local:whole:")
        assert job.trained_tokens > 0
        metrics = metrics_of(client, job_id)
        assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5, 6]
        assert [round(row["noise/sigma"], 4) for row in metrics[1:]] == [0, 0, 0.01, 0.01, 0.0005, 0.0005]
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job_id))
        assert [checkpoint.step_number for checkpoint in checkpoints] == [6, 4, 2]
        messages = [event.message for event in client.fine_tuning.jobs.list_events(job_id)]
        assert "The job has successfully completed." in messages
        archive = client.get(f"/fine_tuning/jobs/{job_id}/adapter", cast_to=httpx.Response).content
        name = f"/fine_tuning/checkpoints/{checkpoints[0].id}/adapter"
        assert client.get(name, cast_to=httpx.Response).content == archive

    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "download", filter="data")
    base, _ = open_base(ModelConfig(id="tiny", source=str(tmp_path / "tiny")), settings.cache)
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, str(tmp_path / "download" / "adapter"))(ids).logits
    assert not torch.equal(before, after)


def test_a_stack_that_stops_in_a_run_goes_on_with_it_at_its_next_start(settings, tmp_path):
    with EmbeddedStack(settings) as stack, client_of(stack) as client:
        job_id = submit(client, tmp_path, max_steps=40)
        wait_until(lambda: len(metrics_of(client, job_id)) > 4, what="progress", timeout_s=60)
    with EmbeddedStack(settings) as stack, client_of(stack) as client:
        stopped_at = metrics_of(client, job_id)[-1]["step"]

        job = wait_until(lambda: ended(client, job_id), what="the end of the job", timeout_s=90)

        assert job.status == "succeeded", job.error
        metrics = metrics_of(client, job_id)
        assert [row["step"] for row in metrics] == list(range(41))
        assert {row["attempt"] for row in metrics if row["step"] <= stopped_at} == {1}
        assert {row["attempt"] for row in metrics if row["step"] > stopped_at} == {2}


def test_a_base_folder_with_a_missing_tensor_fails_in_its_first_seconds_and_names_it(settings, tmp_path):
    weights = tmp_path / "tiny" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with EmbeddedStack(settings) as stack, client_of(stack) as client:
        job_id = submit(client, tmp_path)

        job = wait_until(lambda: ended(client, job_id), what="progress", timeout_s=60)

        assert (job.status, job.error.code) == ("failed", "bad_checkpoint")
        assert "model.layers.1.mlp.up_proj.weight" in job.error.message
        assert str(tmp_path) not in job.error.message
        assert not metrics_of(client, job_id)


def test_a_job_that_is_paused_in_training_goes_on_with_its_next_step(settings, tmp_path):
    with EmbeddedStack(settings) as stack, client_of(stack) as client:
        job_id = submit(client, tmp_path, max_steps=40)
        wait_until(lambda: len(metrics_of(client, job_id)) > 4, what="progress", timeout_s=60)

        client.fine_tuning.jobs.pause(job_id)
        paused = lambda: client.fine_tuning.jobs.retrieve(job_id).status == "paused"  # noqa: E731
        wait_until(paused, what="the pause", timeout_s=20)
        stopped_at = metrics_of(client, job_id)[-1]["step"]
        client.fine_tuning.jobs.resume(job_id)
        job = wait_until(lambda: ended(client, job_id), what="the end of the job", timeout_s=90)

        assert job.status == "succeeded", job.error
        attempts = {row["step"]: row["attempt"] for row in metrics_of(client, job_id)}
        assert attempts == {step: 1 if step <= stopped_at else 2 for step in range(41)}
        assert 0 < stopped_at < 40
        assert job.model_extra["usage"]["gpu_seconds"] > 1
