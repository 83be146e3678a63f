import pytest

from app.jobs.state import ENDED, MOVES, SOURCES, JobState

ALLOWED = {
    ("queued", "running"),
    ("queued", "paused"),
    ("queued", "cancelled"),
    ("running", "queued"),
    ("running", "paused"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "cancelled"),
    ("paused", "queued"),
    ("paused", "cancelled"),
}


@pytest.mark.parametrize("source", JobState)
@pytest.mark.parametrize("target", JobState)
def test_a_job_makes_these_moves_and_no_others(source, target):
    assert (target in MOVES[source]) == ((source, target) in ALLOWED)
    assert (source in SOURCES[target]) == ((source, target) in ALLOWED)


def test_a_job_that_has_ended_stays_so():
    assert {"succeeded", "failed", "cancelled"} == ENDED
