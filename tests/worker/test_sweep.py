"""What the sweep mends, with a real broker and without."""

import pytest
from sqlalchemy import update

from app import broker, db
from app.jobs import service
from app.jobs.models import Job
from app.settings import Settings
from tests.live import settings_of_process


@pytest.fixture
def settings(tmp_path, redis_server):
    made = Settings(home=tmp_path / "home", redis_url=redis_server.url, lease_timeout_s=2.0, sweep_s=30.0)
    made.home.mkdir()
    with settings_of_process(made) as settings:
        yield settings


def age(**columns):
    """Move times of all jobs an hour back."""
    with db.transaction() as session:
        session.execute(update(Job).values({name: getattr(Job, name) - 3600 for name in columns}))


def test_new_jobs_are_rung_and_old_ones_again_only_once_no_message_waits(submit):
    submit()
    broker.sweep()
    assert broker.waiting() == 1

    age(rung_at=True)
    broker.sweep()
    assert broker.waiting() == 1  # its message is still there
    submit()
    broker.sweep()
    assert broker.waiting() == 2  # the new one's

    age(rung_at=True)
    with broker.get_celery().connection_for_write() as connection:
        connection.default_channel.queue_purge(broker.QUEUE)
    broker.sweep()
    assert broker.waiting() == 2


def test_a_silent_job_is_queued_again_and_after_too_many_times_failed(submit, read, settings):
    job_id = submit()
    for losses in range(1, settings.max_attempts + 1):
        with db.transaction() as session:
            service.claim(session, job_id, "gone")
        broker.sweep()
        assert read(job_id).state == "running"  # its heart beat a moment ago
        age(heartbeat_at=True)
        broker.sweep()
        assert read(job_id).losses == losses

    assert (read(job_id).state, read(job_id).error_code) == ("failed", "worker_lost")


def test_without_a_broker_the_rows_are_mended_all_the_same(submit, read, redis_server):
    job_id = submit()
    with db.transaction() as session:
        service.claim(session, job_id, "gone")
    age(heartbeat_at=True)
    redis_server.stop()

    assert broker.waiting() is None
    broker.sweep()

    assert (read(job_id).state, read(job_id).rung_at) == ("queued", None)
