"""The API: `create_app()`, for uvicorn (`uvicorn --factory app.main:create_app`) and for tests."""

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

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

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


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
    for router in (files, graders, preflight, jobs, queue, models, keys):
        app.include_router(router, dependencies=[bearer])
    app.include_router(health.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    if not logging.getLogger().handlers:  # nobody has set them up: uvicorn was started by hand
        logs.setup()
    with _sweeping():
        yield


@contextmanager
def _sweeping() -> Iterator[None]:
    """Sweep on a thread, so that a lost message or worker is found without any worker."""
    stopped = threading.Event()

    def sweep() -> None:
        while not stopped.wait(get_settings().sweep_s):
            try:
                broker.sweep()
            except Exception:  # the database is away: the next sweep finds what this one would have
                logger.exception("a sweep failed")

    thread = threading.Thread(target=sweep, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(STOP_TIMEOUT_S)
