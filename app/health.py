"""Probes: whether this process lives, and whether what it needs is there."""

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app import broker, migrate
from app.db import get_engine
from app.models import catalog
from app.settings import get_settings
from app.storage import get_store

router = APIRouter(tags=["health"])


class Live(BaseModel):
    """This process answers."""

    status: str = "ok"


class Part(BaseModel):
    """Whether a part is there, and in a line, what is wrong with it."""

    ok: bool
    error: str | None = None


class Ready(BaseModel):
    """All parts."""

    ok: bool
    parts: dict[str, Part]


@router.get("/livez")
def livez() -> Live:
    """Whether this process answers."""
    return Live()


@router.get("/readyz", response_model=Ready, responses={503: {"model": Ready}})
def readyz() -> JSONResponse:
    """Whether the database, its schema, the broker, the store and the list of models are there; 503 if not."""
    parts = {name: _part(check) for name, check in CHECKS.items()}
    ready = Ready(ok=all(part.ok for part in parts.values()), parts=parts)
    return JSONResponse(ready.model_dump(), status_code=200 if ready.ok else 503)


def _part(check: Callable[[], str | None]) -> Part:
    fault = check()
    return Part(ok=fault is None, error=fault)


def _database() -> str | None:
    engine: Engine = get_engine()
    try:
        return migrate.schema_fault(engine)
    except SQLAlchemyError:
        return "The database is away."


def _redis() -> str | None:
    return "The broker is away." if broker.waiting() is None else None


def _store() -> str | None:
    try:
        get_store().check()
    except OSError as error:
        return f"The store cannot be written to: {error.strerror or type(error).__name__}."
    return None


def _models() -> str | None:
    try:
        catalog.read(get_settings().models_file)
    except catalog.BadModelsFile as error:
        return str(error)
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "database": _database,
    "redis": _redis,
    "store": _store,
    "models": _models,
}
