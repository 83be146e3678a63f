"""What `celery -A worker.celery_app worker` loads: the task, logging, and the sweep in the worker's main process."""

from typing import Any

from celery import signals

from app import broker, db, guard, logs
from worker import sweeper, tasks

app = broker.get_celery()


@app.task(name=broker.TRAIN, ignore_result=True)
def train(job_id: str) -> None:
    """Run a job's next attempt; the message is a doorbell."""
    tasks.train(job_id)


@signals.setup_logging.connect
def _set_up_logging(**kwargs: Any) -> None:
    logs.setup()


@signals.worker_process_init.connect
def _enter_pool(**kwargs: Any) -> None:
    guard.die_with_parent()
    db.reset()


@signals.worker_ready.connect
def _start_sweeping(**kwargs: Any) -> None:  # sent after each reconnection to the broker
    sweeper.start()


@signals.worker_shutting_down.connect
def _stop_runs(**kwargs: Any) -> None:
    tasks.stop()


@signals.worker_shutdown.connect
def _stop_sweeping(**kwargs: Any) -> None:
    sweeper.stop()
