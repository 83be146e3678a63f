"""The Celery instance and the doorbell: a message is a job id, and one lost, doubled or late is harmless."""

import logging
from functools import cache
from typing import Any

from celery import Celery
from kombu.exceptions import ChannelError, OperationalError

from app.db import transaction
from app.jobs import service
from app.settings import get_settings

logger = logging.getLogger(__name__)

TRAIN = "qerl.train"
QUEUE = "gpu"


@cache
def get_celery() -> Celery:
    """This process's Celery: one message at a time, acknowledged before it runs, no results."""
    celery = Celery("qerl", broker=get_settings().redis_url, set_as_current=True)
    celery.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_concurrency=1,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        # Only tasks that are acknowledged late are cancelled, and there are none; False, the default, warns.
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_enable_prefetch_count_reduction=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=2.0,
        broker_transport_options={
            "socket_connect_timeout": 2.0,
            "socket_timeout": 10.0,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
    )
    return celery


def ring(job_id: str) -> bool:
    """Tell the workers of a queued job. False if the broker is away: the sweep will ring again."""
    try:
        get_celery().send_task(TRAIN, args=[job_id], queue=QUEUE, retry=False)
    except (OperationalError, OSError) as error:
        logger.warning("the broker is away, the sweep will ring for %s: %s", job_id, error)
        return False
    with transaction() as session:
        service.rung(session, job_id)
    return True


def waiting() -> int | None:
    """How many messages no worker has taken yet; None if the broker is away."""
    try:
        with get_celery().connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            channel: Any = connection.default_channel
            return int(channel.queue_declare(QUEUE, passive=True).message_count)
    except ChannelError:  # no such queue: nobody ever rang
        return 0
    except (OperationalError, OSError):
        return None


def sweep() -> None:
    """Mend what was lost: jobs of silent workers go back to the queue, and queued ones are rung for again.

    While messages wait, every worker is busy and no message is known to be lost: only new ones are sent then, or a
    long run would find the queue full of its followers' messages.
    """
    settings = get_settings()
    older_than_s = None if waiting() else settings.sweep_s  # asked first: a broker that hangs must hold no lock
    with transaction() as session:
        service.requeue_lost(session, lease_timeout_s=settings.lease_timeout_s, max_attempts=settings.max_attempts)
        due = service.unrung(session, older_than_s=older_than_s)
    for job_id in due:
        if not ring(job_id):
            break
