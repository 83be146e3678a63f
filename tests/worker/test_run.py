"""How an attempt ends, and what is then written."""

import errno
import logging
import os
import signal

import pytest

from app import db
from app.jobs import service
from app.storage import get_store
from qerl_core.errors import BadCheckpoint
from worker import run
from worker.child import UNREPORTED


@pytest.fixture(autouse=True)
def _as_it_was():
    """Put back what `main` sets up for a process of its own."""
    root, handler = logging.getLogger(), signal.getsignal(signal.SIGTERM)
    handlers, level = root.handlers[:], root.level
    yield
    signal.signal(signal.SIGTERM, handler)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def play(lease, read):
    """Run the lease's attempt with a loop; returns the exit status and the row."""

    def run_with(train):
        code = run.main((lease.job_id, str(lease.attempt)), train)
        return code, read(lease.job_id)

    return run_with


def finish(config, folder, observer, *, cache):
    observer.on_start(-1)
    for step in range(1, config.num_steps + 1):
        if observer.on_step(step, {"reward/mean": 0.5}):
            return False
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    observer.on_checkpoint(config.num_steps, folder)
    return True


def test_a_run_reads_its_data_from_a_local_copy_and_succeeds(play, settings, lease):
    def train(config, folder, observer, *, cache):
        assert config.data.train_path.read_text() == '{"messages": []}\n'
        assert config.data.train_path.is_relative_to(settings.scratch / lease.job_id)
        assert folder == settings.scratch / lease.job_id / "run"
        assert cache == settings.cache
        return finish(config, folder, observer, cache=cache)

    code, job = play(train)

    assert (code, job.state) == (0, "succeeded")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BadCheckpoint("tensor lm_head.weight is missing"), "bad_checkpoint", "tensor lm_head.weight is missing"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", "The worker's disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full", "The worker's disk is full"),
    ],
)
def test_what_a_loop_raises_is_the_job_s_error(play, error, code, message):
    def train(config, folder, observer, *, cache):
        raise error

    status, job = play(train)

    assert (status, job.state, job.error_code) == (0, "failed", code)
    assert job.error_message.startswith(message)


def test_what_nobody_expected_is_left_to_the_worker_to_report(play, read, lease):
    def train(config, folder, observer, *, cache):
        raise KeyError("surprise")

    with pytest.raises(KeyError, match="surprise"):
        play(train)
    assert read(lease.job_id).state == "running"


def test_a_loop_that_ends_without_its_last_checkpoint_has_not_succeeded(play):
    def train(config, folder, observer, *, cache):
        observer.on_start(-1)
        return True

    with pytest.raises(RuntimeError, match="the last checkpoint is step -1, not 4"):
        play(train)


def test_a_stop_before_the_first_step_gives_the_job_back_at_once(play):
    def train(config, folder, observer, *, cache):
        observer.on_start(-1)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    code, job = play(train)

    assert (code, job.state, job.losses) == (0, "queued", 0)


def test_a_stop_during_the_run_waits_for_the_step(play):
    def train(config, folder, observer, *, cache):
        observer.on_start(-1)
        assert not observer.on_step(1, {})
        os.kill(os.getpid(), signal.SIGTERM)
        assert observer.on_step(2, {})
        return False

    code, job = play(train)

    assert (code, job.state, job.step) == (0, "queued", 2)


def test_a_superseded_run_ends_quietly_and_changes_nothing(play, lease, read):
    def train(config, folder, observer, *, cache):
        observer.on_start(-1)
        with db.transaction() as session:
            service.release(session, lease, "as a sweep does")
            service.claim(session, lease.job_id, "another")
        return finish(config, folder, observer, cache=cache)

    code, job = play(train)

    assert (code, job.state, job.attempt, job.worker, job.step) == (0, "running", 2, "another", 0)


def test_a_run_whose_file_was_deleted_says_so(play):
    get_store().delete("files/rows.jsonl")

    code, job = play(finish)

    assert (code, job.state, job.error_code) == (0, "failed", "bad_data")


def test_a_run_that_cannot_report_tells_its_worker(play, monkeypatch):
    def train(config, folder, observer, *, cache):
        def away(**kw):
            raise db.OperationalError("UPDATE", {}, ConnectionError("gone"))

        with monkeypatch.context() as patch:
            patch.setattr(db, "transaction", away)
            patch.setattr(observer, "patience_s", 0.0)
            observer.on_start(-1)

    code, job = play(train)

    assert (code, job.state) == (UNREPORTED, "running")
