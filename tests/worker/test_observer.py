"""Steps become rows, checkpoints archives."""

import os
import tarfile

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from app import db
from app.errors import LeaseLost
from app.jobs import service
from app.jobs.models import Checkpoint, Event, StepMetrics
from app.storage import get_store
from qerl_core.config import SafeguardsConfig
from worker import observer as module
from worker.observer import JobObserver, pack


@pytest.fixture
def observer(lease, tmp_path):
    return JobObserver(lease, num_steps=4, folder=tmp_path, patience_s=5.0)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step" / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
    return folder.parent


def rows(*columns):
    with db.transaction(read_only=True) as session:
        return [tuple(row) for row in session.execute(select(*columns).order_by(columns[0]))]


def test_the_same_files_give_the_same_archive(checkpoint, tmp_path):
    adapter = checkpoint / "adapter"
    pack(adapter, tmp_path / "a.tar.gz")
    os.utime(adapter / "adapter_config.json", (1, 1))
    (adapter / "adapter_config.json").chmod(0o600)
    pack(adapter, tmp_path / "b.tar.gz")

    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_an_archive_has_files_only_and_nobody_s_name(checkpoint, tmp_path):
    (checkpoint / "adapter" / "link").symlink_to("/etc/passwd")
    pack(checkpoint / "adapter", tmp_path / "a.tar.gz")

    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    facts = {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode, m.isfile()) for m in members}
    assert facts == {(0, 0, "", "", 0, 0o644, True)}


def test_a_checkpoint_is_published_once_even_if_the_run_resumes_from_it(observer, lease, checkpoint, tmp_path):
    observer.on_start(-1)
    observer.on_step(1, {"reward/mean": 0.5})
    observer.on_checkpoint(1, checkpoint)
    [(key, sha256)] = rows(Checkpoint.key, Checkpoint.sha256)

    resumed = JobObserver(lease, num_steps=4, folder=tmp_path, patience_s=5.0)
    resumed.on_start(1)
    resumed.on_checkpoint(1, checkpoint)

    assert key == f"jobs/{lease.job_id}/attempts/1/step-000001.tar.gz"
    assert rows(Checkpoint.key, Checkpoint.sha256) == [(key, sha256)]
    assert get_store().open(key).read()
    assert resumed.published == 1
    assert not (tmp_path / "step-000001.tar.gz").exists()


def test_a_checkpoint_that_was_made_but_not_published_is_published_on_resumption(observer, checkpoint):
    observer.on_start(1)
    assert observer.published == -1

    observer.on_checkpoint(1, checkpoint)

    assert rows(Checkpoint.step) == [(1,)]


def test_a_resumed_run_has_each_step_once(observer, read, lease):
    observer.on_start(-1)
    for step in range(4):
        observer.on_step(step, {"reward/mean": 0.5, "tokens/trained": 10.0})

    observer.on_start(1)

    assert rows(StepMetrics.step) == [(0,), (1,)]
    assert (read(lease.job_id).step, read(lease.job_id).trained_tokens) == (1, 20)
    observer.on_step(2, {"reward/mean": 0.7, "tokens/trained": 10.0})
    assert read(lease.job_id).trained_tokens == 30
    with db.transaction(read_only=True) as session:
        assert session.scalars(select(Event.step).where(Event.step.is_not(None)).order_by(Event.id)).all() == [0, 1, 2]


def test_the_time_left_is_told_from_steps_not_from_the_evaluation_before_them(observer, read, lease, monkeypatch):
    clock = iter([0.0, 100.0, 110.0, 130.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with monkeypatch.context() as patch:
        patch.setattr(observer, "_write", lambda work: None)
        observer.on_start(-1)

    left = [observer._seconds_left(step) for step in (0, 1, 2)]

    assert left == [None, 30.0, 30.0]


def test_a_stop_is_told_after_the_next_step(observer):
    observer.on_start(-1)
    assert observer.idle
    assert observer.on_step(1, {}) is False
    observer.stop()
    assert observer.on_step(2, {}) is True
    assert not observer.idle


def test_a_cancelled_run_learns_it_from_whatever_it_writes(observer, lease, checkpoint):
    observer.on_start(-1)
    with db.transaction() as session:
        service.cancel(session, lease.job_id)

    for write in (
        lambda: observer.on_phase("training"),
        lambda: observer.on_note("Rollouts by hf."),
        lambda: observer.on_start(-1),
        lambda: observer.on_step(1, {}),
        lambda: observer.on_checkpoint(1, checkpoint),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert rows(StepMetrics.step) == []
    assert rows(Checkpoint.step) == []


def test_a_database_that_is_away_for_a_moment_costs_nothing(observer, monkeypatch):
    observer.on_start(-1)
    real, faults = db.transaction, iter(range(2))

    def flaky(**kw):
        if next(faults, None) is not None:
            raise OperationalError("UPDATE", {}, ConnectionError("gone"))
        return real(**kw)

    monkeypatch.setattr(db, "transaction", flaky)
    monkeypatch.setattr(db.time, "sleep", lambda seconds: None)
    observer.on_step(1, {"reward/mean": 0.5})

    assert rows(StepMetrics.step) == [(1,)]


def test_a_step_whose_commit_was_not_answered_is_not_counted_twice(observer, read, lease):
    observer.on_start(-1)
    for _ in range(2):
        observer.on_step(1, {"tokens/trained": 5.0})

    assert read(lease.job_id).trained_tokens == 5


def test_a_run_that_goes_wrong_is_stopped_and_paused_with_the_reason_in_an_event(lease, tmp_path, read):
    guarded = JobObserver(lease, num_steps=9, folder=tmp_path, patience_s=5.0, safeguards=SafeguardsConfig())
    guarded.on_start(-1)

    stops = [guarded.on_step(step, {"mismatch/kl": 5.0}) for step in range(6)]
    with db.transaction() as session:
        service.release(session, lease, "it was asked to stop")

    assert stops == [False] * 5 + [True]
    assert read(lease.job_id).state == "paused"
    assert "above max_kl 1.0" in read(lease.job_id).stop_reason
    assert [level for _, level, message in rows(Event.id, Event.level, Event.message) if "max_kl" in message] == [
        "warn", "info"
    ]  # fmt: skip


def test_a_resumed_run_is_held_against_its_first_steps(lease, tmp_path):
    def observe() -> JobObserver:
        return JobObserver(lease, num_steps=30, folder=tmp_path, patience_s=5.0, safeguards=SafeguardsConfig())

    first = observe()
    first.on_start(-1)
    for step in range(1, 6):
        first.on_step(step, {"policy/entropy": 1.0, "reward/mean": 0.5})
    second = observe()
    second.on_start(5)

    stops = [second.on_step(step, {"policy/entropy": 0.01, "reward/mean": 0.4}) for step in range(6, 11)]

    assert stops == [False] * 4 + [True]


def test_the_last_step_ends_a_run_whatever_it_looks_like(lease, tmp_path):
    guarded = JobObserver(lease, num_steps=5, folder=tmp_path, patience_s=5.0, safeguards=SafeguardsConfig())
    guarded.on_start(-1)

    assert not any(guarded.on_step(step, {"mismatch/kl": 5.0}) for step in range(6))
