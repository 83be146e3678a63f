"""Each test runs on SQLite and on PostgreSQL."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app import db
from app.errors import JobConflict, LeaseLost, NotFound
from app.jobs import service
from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.jobs.service import Artifact, Lease
from app.jobs.state import MOVES, JobState

ARTIFACT = Artifact("jobs/x.tar.gz", "0" * 64, 10)


def claim(job_id: str, worker: str = "test") -> Lease:
    with db.transaction() as session:
        return service.claim(session, job_id, worker)


def at_once(*works: Callable[[Session], object]) -> list[object]:
    """Do each in a transaction of its own thread, all together; returns results, or the errors of those that lost."""
    barrier = threading.Barrier(len(works))
    results: list[object] = [None] * len(works)

    def run(place: int) -> None:
        barrier.wait()
        try:
            with db.transaction() as session:
                results[place] = works[place](session)
        except (JobConflict, LeaseLost) as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=[place]) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_eight_that_claim_a_job_one_gets_it(queue, read):
    job_id = queue()

    results = at_once(*[lambda session, i=i: service.claim(session, job_id, f"worker-{i}") for i in range(8)])

    winners = [place for place, result in enumerate(results) if isinstance(result, Lease)]
    assert len(winners) == 1
    assert Counter(map(type, results)) == {Lease: 1, JobConflict: 7}
    job = read(job_id)
    assert (job.state, job.attempt, job.worker) == ("running", 1, f"worker-{winners[0]}")


def test_of_a_cancel_and_a_success_one_wins(queue, read):
    for _ in range(5):
        lease = claim(queue())

        cancelled, succeeded = at_once(
            lambda session: service.cancel(session, lease.job_id),  # noqa: B023 - both end before the next turn
            lambda session: service.succeed(session, lease),  # noqa: B023
        )

        state = read(lease.job_id).state
        if state == "cancelled":
            assert isinstance(succeeded, LeaseLost)
        else:
            assert state == "succeeded"
            assert isinstance(cancelled, JobConflict)


def test_of_two_cancels_one_wins(queue, read):
    job_id = queue()

    results = at_once(*[lambda session: service.cancel(session, job_id)] * 2)

    assert Counter(map(type, results)) == {Job: 1, JobConflict: 1}
    assert read(job_id).state == "cancelled"


def test_of_two_sweeps_one_counts_a_lost_worker(queue, read):
    job_id = queue()
    claim(job_id)
    with db.transaction() as session:
        session.execute(update(Job).values(heartbeat_at=db.now() - 60))

    at_once(*[lambda session: service.requeue_lost(session, lease_timeout_s=30, max_attempts=3)] * 2)

    job = read(job_id)
    assert (job.state, job.losses, job.worker, job.phase) == ("queued", 1, None, None)


def test_a_worker_that_is_lost_too_often_ends_the_job(queue, read):
    job_id = queue()
    for _ in range(2):
        claim(job_id)
        with db.transaction() as session:
            session.execute(update(Job).values(heartbeat_at=db.now() - 60))
        with db.transaction() as session:
            assert service.requeue_lost(session, lease_timeout_s=30, max_attempts=2) == [job_id]

    job = read(job_id)
    assert (job.state, job.error_code, job.losses) == ("failed", "worker_lost", 2)


def test_a_worker_that_beats_is_not_lost(queue, read):
    lease = claim(queue())
    with db.transaction() as session:
        session.execute(update(Job).values(heartbeat_at=db.now() - 60))
        service.heartbeat(session, lease)
        assert service.requeue_lost(session, lease_timeout_s=30, max_attempts=3) == []

    assert read(lease.job_id).state == "running"


def test_the_table_of_moves_holds_in_the_database(queue, read):
    job_id = queue()
    for source, target in product(JobState, JobState):
        with db.transaction() as session:
            session.execute(update(Job).where(Job.id == job_id).values(state=source))

        allowed = target in MOVES[source]
        refusal = pytest.raises(JobConflict, match=f"is {source} and cannot become {target}")
        with nullcontext() if allowed else refusal, db.transaction() as session:
            service.enter(session, job_id, target)

        assert read(job_id).state == (target if allowed else source)


def test_the_database_refuses_a_state_that_is_none(queue):
    job_id = queue()

    with pytest.raises(IntegrityError, match="jobs_state"), db.transaction() as session:
        session.execute(update(Job).where(Job.id == job_id).values(state="paused?"))


def test_an_old_lease_writes_nothing(queue, read):
    old = claim(queue())
    with db.transaction() as session:
        service.release(session, old, "test")
    claim(old.job_id)
    writes: list[Callable[[Session], object]] = [
        lambda session: service.heartbeat(session, old),
        lambda session: service.enter_phase(session, old, "training"),
        lambda session: service.record_step(session, old, 1, {"reward/mean": 1.0}),
        lambda session: service.publish(session, old, 1, ARTIFACT, {}),
        lambda session: service.rewind(session, old, 0),
        lambda session: service.succeed(session, old),
        lambda session: service.fail(session, old, "code", "message"),
        lambda session: service.release(session, old, "test"),
    ]

    for write in writes:
        with pytest.raises(LeaseLost), db.transaction() as session:
            write(session)

    job = read(old.job_id)
    assert (job.state, job.attempt, job.step, job.phase) == ("running", 2, 0, "preparing")


def test_a_step_is_counted_once_however_often_it_comes(queue, read):
    lease = claim(queue())

    for _ in range(2):
        for step in (1, 2):
            with db.transaction() as session:
                values = {"tokens/trained": 10.0, "reward/mean": 0.5}
                service.record_step(session, lease, step, values, seconds_left=100)

    job = read(lease.job_id)
    assert (job.step, job.trained_tokens) == (2, 20)
    assert job.estimated_finish == pytest.approx(job.heartbeat_at + 100, abs=60)


def test_a_rewind_forgets_what_will_come_again(queue, read):
    lease = claim(queue())
    for step in (0, 1, 2, 3):
        with db.transaction() as session:
            service.record_step(session, lease, step, {"tokens/trained": 10.0})

    with db.transaction() as session:
        service.rewind(session, lease, 1)

    job = read(lease.job_id)
    with db.transaction(read_only=True) as session:
        steps = session.scalars(select(StepMetrics.step).order_by(StepMetrics.step)).all()
        events = session.scalars(select(Event.step).where(Event.step.is_not(None)).order_by(Event.step)).all()
    assert (job.step, job.trained_tokens, steps, events) == (1, 20, [0, 1], [0, 1])


def test_the_checkpoint_of_a_step_that_comes_again_replaces_the_first(queue):
    lease = claim(queue())

    for key in ("a", "b"):
        with db.transaction() as session:
            service.publish(session, lease, 2, Artifact(key, "0" * 64, 1), {"loss": 0.5})

    with db.transaction(read_only=True) as session:
        assert session.scalars(select(Checkpoint.key)).all() == ["b"]


def test_a_metric_that_is_no_number_is_left_out(queue):
    lease = claim(queue())

    with db.transaction() as session:
        service.record_step(session, lease, 1, {"reward/mean": 0.5, "ratio": float("nan"), "norm": float("inf")})
        service.publish(session, lease, 1, ARTIFACT, {"loss": float("nan")})

    with db.transaction(read_only=True) as session:
        assert session.scalars(select(StepMetrics.values)).one() == {"reward/mean": 0.5}
        assert session.scalars(select(Checkpoint.metrics)).one() == {}


def test_json_columns_hold_any_text(queue, read):
    text = "é \u2028 \ud800 \0 \N{GRINNING FACE} \\"

    assert read(queue(request={text: [text]})).request == {text: [text]}


def test_a_message_that_no_database_can_hold_is_mended(queue, read):
    lease = claim(queue())

    with db.transaction() as session:
        service.fail(session, lease, "worker_crashed", "its log ends: \0 \ud800 é")

    assert read(lease.job_id).error_message == "its log ends: \N{REPLACEMENT CHARACTER} ? é"


def test_a_new_job_is_rung_for_until_it_was(queue):
    first, second = queue(), queue()

    with db.transaction() as session:
        assert service.unrung(session, older_than_s=30) == [first, second]
        service.rung(session, first)
        assert service.unrung(session, older_than_s=30) == [second]
        assert service.unrung(session, older_than_s=-1) == [first, second]
        assert service.unrung(session, older_than_s=None) == [second]


def test_the_name_of_a_fine_tuned_model_tells_where_it_is_from(queue, read):
    job = read(queue(suffix="sums"))

    assert job.fine_tuned_model == f"ft:tiny:local:sums:{job.id[-8:]}"


def test_there_is_no_job_by_another_id(queue):
    with db.transaction() as session:
        for call in (service.get, service.cancel, lambda session, job_id: service.claim(session, job_id, "test")):
            with pytest.raises(NotFound):
                call(session, "ftjob-none")
