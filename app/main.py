"""The API: `create_app()`, for uvicorn (`uvicorn --factory app.main:create_app`) and for tests."""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from fastapi import FastAPI

from app import answers, broker, health, logs
from app.dependencies import bearer
from app.files.routes import router as files
from app.graders.routes import router as graders
from app.jobs.preflight import router as preflight
from app.jobs.queue import router as queue
from app.jobs.routes import router as jobs
from app.keys.routes import router as keys
from app.middleware import Authentication, BodyLimit, RequestContext
from app.models.catalog import BadModelsFile, get_catalog
from app.models.routes import router as models
from app.settings import get_settings
from app.webhooks import delivery
from app.webhooks.routes import router as webhooks

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
WEBHOOKS_S = 1.0
"""Between looks into the outbox."""


def create_app() -> FastAPI:
    """The app. SystemExit in a line if the list of models is faulty."""
    try:
        get_catalog()
    except BadModelsFile as error:
        raise SystemExit(f"qerl: {error}") from error
    app = FastAPI(
        title="QeRL",
        description="Reinforcement fine-tuning over OpenAI's fine-tuning API.",
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(Authentication)
    app.add_middleware(RequestContext)  # added last, so it is the outermost
    answers.install(app)
    for router in (files, graders, preflight, jobs, queue, models, keys, webhooks):
        app.include_router(router, dependencies=[bearer])
    app.include_router(health.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    if not logging.getLogger().handlers:  # nobody has set them up: uvicorn was started by hand
        logs.setup()
    with ExitStack() as threads:
        # A lost message or worker is found without any worker. Webhooks leave from here and not from workers, whose
        # main process forks and must hold no lock of a connection's then.
        threads.enter_context(_repeating("sweep", lambda: broker.sweep(), every_s=get_settings().sweep_s))
        threads.enter_context(_repeating("webhooks", lambda: delivery.deliver_due(), every_s=WEBHOOKS_S))
        yield


@contextmanager
def _repeating(name: str, work: Callable[[], object], *, every_s: float) -> Iterator[None]:
    """Do `work` on a thread, again and again."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(every_s):
            try:
                work()
            except Exception:  # the database is away: the next time finds what this one would have
                logger.exception("%s failed", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(STOP_TIMEOUT_S)
