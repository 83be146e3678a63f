"""Pause, resume, limits and delete, on SQLite and PostgreSQL; a pause is a wish until the run has kept its step."""

from collections.abc import Callable

import pytest
from sqlalchemy import func, select, update

from app import db
from app.db import now
from app.errors import BadRequest, JobConflict, LeaseLost
from app.jobs import service
from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.jobs.service import Artifact, Lease


def do(work: Callable, *args: object, **kw: object):
    with db.transaction() as session:
        return work(session, *args, **kw)


def claim(job_id: str) -> Lease:
    return do(service.claim, job_id, "worker")


def test_a_queued_job_is_paused_at_once_and_no_worker_takes_it(queue, read):
    job_id = queue()

    assert do(service.pause, job_id).state == "paused"

    assert do(service.claim_next, "worker") is None
    with pytest.raises(JobConflict):
        claim(job_id)
    assert do(service.unrung, older_than_s=None) == []
    assert do(service.resume, job_id).state == "queued"
    assert do(service.unrung, older_than_s=None) == [job_id]


def test_a_running_job_keeps_its_step_and_is_paused_when_its_run_lets_go(queue, read):
    lease = claim(queue())
    assert do(service.heartbeat, lease) is False

    asked = do(service.pause, lease.job_id)
    assert (asked.state, asked.phase) == ("running", "pausing")
    assert do(service.heartbeat, lease) is True
    do(service.enter_phase, lease, "training")
    do(service.record_step, lease, 1, {"reward/mean": 0.5})
    assert read(lease.job_id).phase == "pausing"
    do(service.release, lease, "asked")

    job = read(lease.job_id)
    assert (job.state, job.step, job.worker, job.phase, job.losses) == ("paused", 1, None, None, 0)
    with pytest.raises(LeaseLost):
        do(service.heartbeat, lease)
    again = do(service.resume, lease.job_id)
    assert (again.state, again.stop_as, again.stop_reason) == ("queued", None, None)
    assert claim(lease.job_id).attempt == 2


def test_a_pause_that_is_taken_back_in_time_leaves_the_job_in_the_queue(queue, read):
    lease = claim(queue())
    do(service.pause, lease.job_id)

    assert do(service.resume, lease.job_id).state == "running"
    assert do(service.heartbeat, lease) is False
    do(service.release, lease, "its worker shut down")

    assert read(lease.job_id).state == "queued"


def test_a_pausing_run_may_still_succeed_fail_or_be_cancelled(queue, read):
    for work, state in ((service.succeed, "succeeded"), (service.cancel, "cancelled")):
        lease = claim(queue())
        do(service.pause, lease.job_id)
        do(work, lease.job_id if work is service.cancel else lease)
        assert read(lease.job_id).state == state


def test_a_worker_lost_while_it_pauses_leaves_the_job_paused(queue, read):
    lease = claim(queue())
    do(service.pause, lease.job_id)
    do(lambda session: session.execute(update(Job).values(heartbeat_at=now() - 60)))

    do(service.requeue_lost, lease_timeout_s=30, max_attempts=3)

    assert (read(lease.job_id).state, read(lease.job_id).losses) == ("paused", 1)


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_what_has_ended_is_neither_paused_nor_resumed(queue, state):
    lease = claim(queue())
    do(service.cancel, lease.job_id) if state == "cancelled" else do(service.succeed, lease)

    for work in (service.pause, service.resume):
        with pytest.raises(JobConflict, match=f"is {state}"):
            do(work, lease.job_id)


def test_a_job_that_only_waits_or_runs_is_not_resumed(queue, read):
    job_id = queue()
    with pytest.raises(JobConflict):
        do(service.resume, job_id)
    claim(job_id)
    with pytest.raises(JobConflict):
        do(service.resume, job_id)


@pytest.mark.parametrize("limit", ["max_gpu_seconds", "max_wall_seconds"])
@pytest.mark.parametrize(("on_limit", "state"), [("pause", "paused"), ("fail", "failed")])
def test_a_used_up_limit_stops_the_run_at_a_checkpoint(queue, read, limit, on_limit, state):
    lease = claim(queue(limits={limit: 60, "on_limit": on_limit}))
    assert do(service.heartbeat, lease) is False
    do(lambda session: session.execute(update(Job).values(gpu_seconds=61.0, wall_from=now() - 61)))

    assert do(service.heartbeat, lease) is True
    do(service.release, lease, "asked")

    job = read(lease.job_id)
    assert job.state == state
    assert (job.error_code == "limit_reached") == (on_limit == "fail")
    assert f"limits.{limit} 60 is used up" in (job.error_message or job.stop_reason)


def test_a_job_out_of_gpu_seconds_goes_on_only_with_more(queue, read):
    job_id = queue(limits={"max_gpu_seconds": 60, "on_limit": "pause"}, gpu_seconds=61.0)
    do(service.pause, job_id)

    for limits in (None, {"max_gpu_seconds": 61, "on_limit": "pause"}):
        with pytest.raises(BadRequest, match="61 of its"):
            do(service.resume, job_id, limits)
    assert read(job_id).state == "paused"
    assert do(service.resume, job_id, {"max_gpu_seconds": 90, "on_limit": "fail"}).limits["max_gpu_seconds"] == 90


def test_gpu_seconds_are_those_of_all_attempts_and_none_between_them(queue, read):
    job_id = queue()
    for _ in range(2):
        lease = claim(job_id)
        do(lambda session: session.execute(update(Job).values(heartbeat_at=now() - 10)))
        do(service.heartbeat, lease)
        do(lambda session: session.execute(update(Job).values(heartbeat_at=now() - 5)))
        do(service.release, lease, "its worker shut down")
        do(lambda session: session.execute(update(Job).values(heartbeat_at=now() - 1000)))  # it waits

    assert 30 <= read(job_id).gpu_seconds < 35


def test_delete_takes_all_of_a_job_that_has_ended_and_nothing_of_another(queue, read):
    gone, kept = claim(queue()), claim(queue())
    for lease in (gone, kept):
        do(service.record_step, lease, 1, {"reward/mean": 0.5})
        do(service.publish, lease, 1, Artifact(f"{lease.job_id}.tar.gz", "0" * 64, 1), {})
    with pytest.raises(JobConflict, match="cancel it"):
        do(service.remove, gone.job_id)
    do(service.succeed, gone)

    assert do(service.remove, gone.job_id) == [f"{gone.job_id}.tar.gz"]

    with db.transaction(read_only=True) as session:
        for table in (Event, StepMetrics, Checkpoint):
            left = select(func.count()).select_from(table)
            assert session.scalar(left.where(table.job_id == gone.job_id)) == 0
            assert session.scalar(left.where(table.job_id == kept.job_id)) > 0
    with pytest.raises(LeaseLost):
        do(service.heartbeat, gone)
