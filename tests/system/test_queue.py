"""The queue on real servers: whatever is lost, doubled or killed, a job ends in one right state and leaves nothing."""

import hashlib
import os
import signal
import tarfile
import time

import pytest

from app import broker, db
from app.jobs import service as jobs
from app.jobs.models import Job
from app.storage import get_store
from tests.live import gone, processes, wait_until


def test_a_job_runs_to_its_published_adapter(make_service, database_url):
    service = make_service(database_url=database_url)
    worker = service.start_worker()

    job = service.wait_for(service.submit(), "succeeded")

    assert (job.attempt, job.losses, job.step, job.trained_tokens) == (1, 0, 6, 42)
    assert (job.phase, job.estimated_finish, job.error_code) == (None, None, None)
    assert service.steps(job.id) == [(step, 1) for step in range(7)]
    assert [checkpoint.step for checkpoint in service.checkpoints(job.id)] == [2, 4, 6]
    last = service.checkpoints(job.id)[-1]
    with get_store().open(last.key) as file:
        content = file.read()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (last.sha256, last.num_bytes)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            assert archive.getnames() == ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
            assert archive.extractfile("adapter/adapter_config.json").read() == b'{"step": 6}'
    assert service.events(job.id)[-1] == "The job has successfully completed."
    scratch = service.settings.scratch / job.id
    wait_until(lambda: {path.name for path in scratch.iterdir()} == {"attempt-1.log", "lock"}, what="a tidy scratch")
    assert not processes(worker.pool)


def test_a_message_that_comes_three_times_runs_the_job_once(make_service):
    service = make_service()
    job_id = service.submit()
    broker.ring(job_id)
    broker.ring(job_id)
    worker = service.start_worker()

    service.wait_for(job_id, "succeeded")

    wait_until(lambda: worker.log.read_text().count("nothing to do") == 2, what="the other messages")
    assert service.job(job_id).attempt == 1
    assert service.steps(job_id) == [(step, 1) for step in range(7)]


def test_a_cancel_ends_the_run_within_three_seconds(make_service):
    service = make_service(heartbeat_s=1.0)
    worker = service.start_worker()
    job_id = service.submit(num_steps=1000, step_s=0.1)
    service.wait_for_step(job_id, 1)
    started = processes(worker.pool)
    assert len(started) == 3  # guard, run, and what the run left in a session of its own

    began = time.monotonic()
    with db.transaction() as session:
        jobs.cancel(session, job_id)
    wait_until(lambda: gone(started), timeout_s=5, what="the run's processes to be gone")

    assert time.monotonic() - began < 3
    assert service.job(job_id).state == "cancelled"
    # The worker goes on with the next job.
    service.wait_for(service.submit(), "succeeded")


def test_a_run_that_is_killed_fails_with_the_end_of_its_log(make_service):
    service = make_service()
    worker = service.start_worker()

    job = service.wait_for(service.submit(die_at=3), "failed")

    assert job.error_code == "worker_crashed"
    assert "was killed by SIGKILL" in job.error_message
    assert "step 3 reads somewhere.bin" in job.error_message
    assert str(service.settings.home) not in job.error_message
    wait_until(lambda: not processes(worker.pool), what="the run's processes to be gone")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("diverged", "training_diverged", "the loss of step 3 is not finite"),
        ("disk_full", "disk_full", "The worker's disk is full"),
        ("bug", "worker_crashed", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_run_that_raises_fails_with_its_code(make_service, error, code, said):
    service = make_service()
    service.start_worker()

    job = service.wait_for(service.submit(raise_at=3, error=error), "failed")

    assert job.error_code == code
    assert said in job.error_message
    assert "/var/somewhere" not in job.error_message


def test_a_worker_that_is_killed_takes_its_run_along_and_another_goes_on(make_service):
    service = make_service()
    worker = service.start_worker()
    job_id = service.submit(num_steps=20, checkpoint_every=5, step_s=0.1)
    service.wait_for_step(job_id, 7)

    os.kill(worker.pid, signal.SIGKILL)

    wait_until(lambda: gone(worker.everything()), timeout_s=5, what="all of the worker to be gone")
    step = service.job(job_id).step
    service.start_worker()
    job = service.wait_for(job_id, "succeeded", timeout_s=60)
    assert (job.attempt, job.losses) == (2, 1)
    resumed_from = step - step % 5
    assert service.steps(job_id) == [(n, 1 if n <= resumed_from else 2) for n in range(21)]
    assert job.trained_tokens == 7 * 20
    assert [checkpoint.step for checkpoint in service.checkpoints(job_id)] == list(range(5, 21, 5))


def test_a_job_that_keeps_losing_its_worker_fails(make_service):
    service = make_service(max_attempts=1, lease_timeout_s=1.5)
    worker = service.start_worker()
    job_id = service.submit(num_steps=1000, step_s=0.1)
    service.wait_for_step(job_id, 1)

    os.kill(worker.pool, signal.SIGKILL)

    assert service.wait_for(job_id, "failed").error_code == "worker_lost"
    # The worker has forked another process for its pool.
    service.wait_for(service.submit(), "succeeded")


def test_without_redis_a_job_is_late_not_lost(make_service, redis_server):
    service = make_service()
    service.start_worker()
    redis_server.stop()
    job_id = service.submit(ring=False)
    assert not broker.ring(job_id)

    time.sleep(1.5)
    assert service.job(job_id).state == "queued"
    redis_server.start()

    service.wait_for(job_id, "succeeded", timeout_s=60)


def test_a_worker_that_shuts_down_gives_its_job_back_at_a_checkpoint(make_service):
    service = make_service()
    worker = service.start_worker()
    job_id = service.submit(num_steps=30, checkpoint_every=100, step_s=0.1)
    service.wait_for_step(job_id, 3)
    everything = worker.everything()

    worker.stop()

    assert worker.wait(20) == 0
    assert gone(everything)
    job = service.job(job_id)
    assert (job.state, job.losses, job.worker) == ("queued", 0, None)
    [checkpoint] = service.checkpoints(job_id)
    assert checkpoint.step == job.step
    service.start_worker()
    assert service.wait_for(job_id, "succeeded").attempt == 2
    assert service.steps(job_id) == [(n, 1 if n <= checkpoint.step else 2) for n in range(31)]


def test_a_paused_job_keeps_its_step_gives_its_worker_back_and_goes_on(make_service):
    service = make_service()
    service.start_worker()
    job_id = service.submit(num_steps=30, checkpoint_every=30, step_s=0.1)
    service.wait_for_step(job_id, 3)

    with db.transaction() as session:
        jobs.pause(session, job_id)
    paused = service.wait_for(job_id, "paused", timeout_s=5)
    other = service.submit(num_steps=2)
    service.wait_for(other, "succeeded")
    assert paused.step >= 3
    assert service.job(job_id).attempt == 1
    assert [checkpoint.step for checkpoint in service.checkpoints(job_id)] == [paused.step]
    with db.transaction() as session:
        jobs.resume(session, job_id)
    broker.ring(job_id)
    service.wait_for(job_id, "succeeded")

    attempts = [(step, 1 if step <= paused.step else 2) for step in range(31)]
    assert service.steps(job_id) == attempts


def test_a_job_whose_gpu_seconds_are_used_up_pauses_by_itself_and_goes_on_with_more(make_service):
    service = make_service()
    service.start_worker()
    job_id = service.submit(num_steps=60, step_s=0.1, ring=False)
    with db.transaction() as session:
        session.get_one(Job, job_id).limits = {"max_gpu_seconds": 2, "on_limit": "pause"}
    broker.ring(job_id)

    paused = service.wait_for(job_id, "paused")
    assert 2 <= paused.gpu_seconds < 5
    assert any("limits.max_gpu_seconds 2 is used up" in message for message in service.events(job_id))
    with db.transaction() as session:
        jobs.resume(session, job_id, {"max_gpu_seconds": 60, "on_limit": "fail"})
    broker.ring(job_id)

    assert service.wait_for(job_id, "succeeded").gpu_seconds > paused.gpu_seconds


def test_one_worker_takes_jobs_by_priority_whatever_the_order_of_the_messages(make_service):
    service = make_service()
    ids = [service.submit(num_steps=1, ring=False) for _ in range(3)]
    with db.transaction() as session:
        session.get_one(Job, ids[2]).priority = 5
    for job_id in ids:
        broker.ring(job_id)

    service.start_worker()

    started = [service.wait_for(job_id, "succeeded").started_at for job_id in ids]
    assert sorted(ids, key=lambda job_id: started[ids.index(job_id)]) == [ids[2], ids[0], ids[1]]
