"""What routes ask for."""

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer

from app import callers
from app.callers import Caller, Scope
from app.keys import service

bearer = Depends(HTTPBearer(auto_error=False, description="A key of `qerl keys create` or `POST /v1/api_keys`."))
"""Tells the OpenAPI document of keys; the middleware has looked at the header before any route is reached."""


def caller() -> Caller:
    """Whoever asks, as the middleware has found."""
    found = callers.current()
    assert found is not None, "the Authentication middleware is missing"
    return found


CallerDep = Annotated[Caller, Depends(caller)]


def admins_only(caller: CallerDep) -> None:
    """Forbidden without the admin scope."""
    service.permit(caller, Scope.ADMIN)
