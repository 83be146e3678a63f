"""Whose turn it is, on SQLite and PostgreSQL, and that the position told is the order in which jobs are taken."""

import random

import pytest

from app import db
from app.callers import Caller, Scope, acting_for
from app.jobs import service, turns
from app.jobs.turns import Turns


def take() -> str | None:
    with db.transaction() as session:
        lease = service.claim_next(session, "worker")
        return lease and lease.job_id


def end(job_id: str) -> None:
    with db.transaction() as session:
        service.cancel(session, job_id)


def positions(*job_ids: str) -> list[int | None]:
    with db.transaction(read_only=True) as session:
        shown = Turns(session)
        return [turn and turn.position for turn in (shown.of(service.get(session, job_id)) for job_id in job_ids)]


def test_without_a_queued_job_nobody_is_next(either_database):
    with db.transaction() as session:
        assert turns.first(session) is None
    assert take() is None


def test_older_jobs_come_first_and_higher_priorities_before_them(queue):
    old, new, urgent, idle = queue(), queue(), queue(priority=5), queue(priority=-1)

    assert positions(old, new, urgent, idle) == [2, 3, 1, 4]
    assert [take() for _ in range(5)] == [urgent, old, new, idle, None]
    assert positions(old) == [None]


def test_an_owner_with_many_jobs_holds_up_nobody_s_first(queue):
    many = [queue(owner="ada") for _ in range(4)]
    one = queue(owner="bob")

    first = take()
    assert positions(one) == [1]
    assert (first, take()) == (many[0], one)


def test_one_worker_serves_owners_in_turn(queue):
    ada, bob = [queue(owner="ada") for _ in range(3)], [queue(owner="bob") for _ in range(2)]

    taken = []
    while (job_id := take()) is not None:
        taken.append(job_id)
        end(job_id)

    assert taken == [ada[0], bob[0], ada[1], bob[1], ada[2]]


def test_a_position_counts_the_jobs_of_others_too_and_tells_nothing_of_them(queue):
    queue(owner="ada")
    mine = queue(owner="bob")

    with acting_for(Caller("bob", Scope.READ)), db.transaction(read_only=True) as session:
        turn = Turns(session).of(service.get(session, mine))

    assert turn is not None
    assert (turn.position, turn.reason) == (2, "It waits for a worker, and a job is ahead of it.")


@pytest.mark.parametrize("seed", range(4))
def test_positions_are_the_order_in_which_many_workers_take_jobs(queue, seed):
    draw = random.Random(seed)
    owners = ["ada", "bob", "cy"]
    for _ in range(draw.randrange(4)):
        queue(owner=draw.choice(owners))
        take()
    waiting = [queue(owner=draw.choice(owners), priority=draw.choice([0, 0, 1])) for _ in range(12)]
    told = dict(zip(waiting, positions(*waiting), strict=True))

    with db.transaction(read_only=True) as session:
        order = turns.order(session)

    assert sorted(told.values()) == list(range(1, 13))
    assert [told[job_id] for job_id in order] == list(range(1, 13))
    assert take() == order[0]
