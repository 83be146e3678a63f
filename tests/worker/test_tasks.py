"""The queue's side of a run, with a shell command for the run."""

import os
import sys

import pytest
from sqlalchemy.exc import OperationalError

from app import broker, db
from app.jobs import service
from app.settings import Settings
from tests.live import processes
from worker import tasks


@pytest.fixture
def rung(monkeypatch):
    """The jobs that were rung for."""
    ids = []
    monkeypatch.setattr(broker, "ring", lambda job_id: ids.append(job_id) or True)
    return ids


@pytest.fixture
def attend(settings, rung, monkeypatch):
    """Take a job whose run is a shell script."""

    def train(job_id: str, script: str) -> None:
        made = Settings(**settings.model_dump() | {"run_command": ("sh", "-c", script), "lease_timeout_s": 1.0})
        monkeypatch.setattr(tasks, "get_settings", lambda: made)
        tasks.train(job_id)

    yield train
    tasks._stopping[0] = 0


def test_a_run_that_dies_without_a_word_fails_the_job(submit, attend, read):
    job_id = submit()
    attend(job_id, "echo about to fall; exit 3")

    job = read(job_id)
    assert (job.state, job.error_code) == ("failed", "worker_crashed")
    assert job.error_message == "The training process ended with exit status 3; its log ends with:\nabout to fall"


def test_what_a_run_leaves_in_its_temporary_folder_goes_with_it(submit, attend, settings):
    job_id = submit()
    attend(job_id, "mktemp -d && ls -d $TMPDIR/*; kill -9 $$")

    assert "/tmp/tmp." in (settings.scratch / job_id / "attempt-1.log").read_text()
    assert not (settings.scratch / job_id / "tmp").exists()


def test_a_run_without_a_program_fails_the_job(submit, attend, read):
    job_id = submit()
    attend(job_id, "exec /opt/gone/python")

    assert "exit status 127" in read(job_id).error_message
    assert "/opt/gone" not in read(job_id).error_message


def test_a_job_that_is_not_queued_is_left_alone(submit, attend, read, settings):
    job_id = submit()
    with db.transaction() as session:
        service.cancel(session, job_id)

    attend(job_id, "touch ran")
    attend("ftjob-never", "touch ran")

    assert read(job_id).attempt == 0
    assert not settings.scratch.exists()


def test_a_worker_that_shuts_down_gives_the_job_back(submit, attend, read, rung, monkeypatch):
    job_id = submit()
    monkeypatch.setattr(tasks, "stopping", iter([False, True, True, True]).__next__)

    attend(job_id, "sleep 1000")

    assert (read(job_id).state, read(job_id).losses, rung) == ("queued", 0, [job_id])


def test_a_worker_that_shuts_down_takes_nothing_new(submit, attend, read):
    job_id = submit()
    tasks.stop()
    attend(job_id, "exit 1")

    assert (read(job_id).state, read(job_id).attempt) == ("queued", 0)


def test_a_run_ends_with_its_lease_when_the_database_is_away(submit, attend, read, monkeypatch):
    job_id = submit()
    real, used = db.transaction, []

    def transaction(**kw):
        used.append(kw)
        if len(used) > 1 and not kw:  # claimed; reading goes on, for the test's sake
            raise OperationalError("UPDATE", {}, ConnectionError("gone"))
        return real(**kw)

    monkeypatch.setattr(db, "transaction", transaction)
    attend(job_id, "sleep 1000")

    assert read(job_id).state == "running"  # for the sweep to find
    assert not processes(os.getpid(), "sleep 1000")


def test_a_run_that_could_not_report_is_given_back(submit, attend, read):
    job_id = submit()
    attend(job_id, f"exit {tasks.child.UNREPORTED}")

    assert read(job_id).state == "queued"


def test_checkpoints_go_when_the_job_has_ended_and_its_logs_stay(submit, attend, settings):
    job_id = submit()
    folder = settings.scratch / job_id
    attend(job_id, f"mkdir -p {folder}/run/checkpoints {folder}/data; echo so long; exit 1")

    assert [path.name for path in folder.iterdir()] == ["attempt-1.log"]


def test_a_pause_stops_the_run_and_one_that_is_killed_for_it_is_paused_too(submit, attend, read, rung):
    for script in ("trap 'exit 0' TERM; sleep 1000 & wait", "sleep 1000"):
        job_id = submit()
        attend(job_id, f"{PAUSE.format(job_id=job_id)}; {script}")

        assert (read(job_id).state, read(job_id).worker) == ("paused", None)
        assert rung == []
        with db.transaction() as session:
            service.cancel(session, job_id)


def test_the_folder_of_a_job_that_was_deleted_as_it_ran_goes_with_it(submit, attend, settings):
    job_id = submit()
    attend(job_id, DELETE.format(job_id=job_id))

    assert not (settings.scratch / job_id).exists()


def test_a_message_is_for_whichever_job_is_next(submit, attend, read):
    first, second = submit(), submit()
    attend(second, "exit 1")

    assert (read(first).attempt, read(second).attempt) == (1, 0)


PYTHON = f"{sys.executable} -c 'from app import db; from app.jobs import service\nwith db.transaction() as s: {{}}'"
PAUSE = PYTHON.format('service.pause(s, "{job_id}")')
DELETE = PYTHON.format('service.cancel(s, "{job_id}"); service.remove(s, "{job_id}")')
