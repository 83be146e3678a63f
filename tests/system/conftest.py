"""The queue for real: a database, a Redis server, Celery workers, a process a run. Only the training is a stand-in."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from app import broker, db
from app.embedded import worker_command
from app.guard import Guarded
from app.jobs import service
from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.migrate import upgrade
from app.settings import Settings
from app.storage import get_store
from tests.live import processes, settings_of_process, wait_until

RUN_TOY = (sys.executable, "-m", "tests.system.toy")


class Worker:
    """A Celery worker with one pool process."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = Guarded(worker_command(log.stem), output=output)
        wait_until(lambda: "ready." in log.read_text(), what=f"a worker: {log}")
        self.guard = self._process.pid
        self.pid, self.pool = processes(self.guard)

    def run_pid(self) -> int:
        """The process of the run, once it is there."""
        return wait_until(lambda: self._runs(), what="a run")[-1]

    def _runs(self) -> list[int]:
        return [
            pid for pid in processes(self.pool, "-m tests.system.toy") if pid not in processes(self.pool, "guard.py")
        ]

    def everything(self) -> list[int]:
        """All of its processes."""
        return [self.guard, *processes(self.guard)]

    def stop(self) -> None:
        """SIGTERM: a warm shutdown."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None if it still runs."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it and all that it started."""
        self._process.kill()


class Service:
    """What a test does with the queue, and what it sees in the rows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._workers: list[Worker] = []

    def start_worker(self) -> Worker:
        """A new worker that is ready for messages."""
        self._workers.append(Worker(self.settings.home / f"worker{len(self._workers)}.log"))
        return self._workers[-1]

    def stop(self) -> None:
        """End what was started."""
        for worker in self._workers:
            worker.kill()

    def submit(self, *, num_steps: int = 6, checkpoint_every: int = 2, ring: bool = True, **plan: object) -> str:
        """Queue a job whose run does what `plan` says (tests/system/toy.py); returns its id."""
        rows = self.settings.home / "rows.jsonl"
        rows.write_text(json.dumps({"messages": [], **plan}) + "\n")
        get_store().put("files/rows.jsonl", rows)
        config = {
            "model": {"id": "tiny", "source": "tiny"},
            "data": {"train_path": "files/rows.jsonl"},
            "grader": {"type": "math", "reference": "{{ item.answer }}"},
            "noise": None,
            "num_steps": num_steps,
            "checkpoint_every": checkpoint_every,
        }
        job = Job(model="tiny", training_file="file-1", request={}, config=config, total_steps=num_steps)
        with db.transaction() as session:
            service.submit(session, job)
        if ring:
            assert broker.ring(job.id)
        return job.id

    def job(self, job_id: str) -> Job:
        """The row as it is now."""
        with db.transaction(read_only=True) as session:
            return service.get(session, job_id)

    def wait_for(self, job_id: str, state: str, *, timeout_s: float = 30.0) -> Job:
        """The row, once it is in a state."""
        wait_until(lambda: self.job(job_id).state == state, timeout_s=timeout_s, what=f"{state}: {self.job(job_id)}")
        return self.job(job_id)

    def wait_for_step(self, job_id: str, step: int) -> None:
        """Return once a step was reported."""
        wait_until(lambda: self.job(job_id).step >= step, what=f"step {step}")

    def steps(self, job_id: str) -> list[tuple[int, int]]:
        """Each reported step and the attempt that made it."""
        query = select(StepMetrics.step, StepMetrics.attempt).where(StepMetrics.job_id == job_id)
        with db.transaction(read_only=True) as session:
            return [(row.step, row.attempt) for row in session.execute(query.order_by(StepMetrics.step))]

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Published checkpoints by step."""
        query = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step)
        with db.transaction(read_only=True) as session:
            return list(session.scalars(query))

    def events(self, job_id: str) -> list[str]:
        """Messages of its log."""
        query = select(Event.message).where(Event.job_id == job_id).order_by(Event.id)
        with db.transaction(read_only=True) as session:
            return list(session.scalars(query))


@pytest.fixture
def make_service(tmp_path, redis_server):
    """Start a service with settings of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        scopes = []

        def make(**changes) -> Service:
            values = {"redis_url": redis_server.url, "run_command": RUN_TOY}
            times = {"heartbeat_s": 0.2, "lease_timeout_s": 3.0, "sweep_s": 1.0}
            settings = Settings(home=tmp_path / "home", **(values | times | changes))
            settings.home.mkdir()
            scope = settings_of_process(settings)
            service = Service(scope.__enter__())
            scopes.append((service, scope))
            upgrade(settings.database_url)
            return service

        yield make
        for made, scope in scopes:
            made.stop()
            scope.__exit__(None, None, None)
