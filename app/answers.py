"""The one error handler: whatever goes wrong in a request is answered with OpenAI's error body."""

import errno
import logging
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy.exc import DataError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import Request

from app.db import AWAY
from app.errors import BadRequest, NotFound, ServiceError, TooLarge, Unavailable
from app.validation import bad_request

logger = logging.getLogger(__name__)

UPLOADS = "/v1/files"
RETRY_AFTER_S = 5


def install(app: FastAPI) -> None:
    """Answer the errors that an app's routes raise on purpose; the middleware calls `answer` for the others."""
    for kind in (ServiceError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def answer(request: Request, error: Exception) -> JSONResponse:
    """The response to an error. Nothing of an unexpected one is told; it is logged."""
    fault = _fault(request, error)
    headers = dict(getattr(error, "headers", None) or {})
    if fault.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    elif fault.status == HTTPStatus.SERVICE_UNAVAILABLE:
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
        headers["retry-after"] = str(RETRY_AFTER_S)
    return JSONResponse(fault.body(), status_code=fault.status, headers=headers)


def _fault(request: Request, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, RequestValidationError):
        return bad_request(error.errors(), error.body, _body_model(request))
    if isinstance(error, HTTPException):
        # FastAPI says of whatever goes wrong while it reads a body that the body is bad.
        return _fault(request, error.__cause__) if isinstance(error.__cause__, OSError) else _http_fault(request, error)
    if isinstance(error, DataError):
        return BadRequest("The request holds text that the database cannot hold, such as a NUL character.")
    if isinstance(error, (*AWAY, PoolTimeout)):
        return Unavailable("The database is away; try again.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable("The server's disk is full.", code="disk_full")
    return ServiceError("The server had an error; its log has the details under this response's x-request-id.")


def _http_fault(request: Request, error: HTTPException) -> ServiceError:
    url = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NotFound(f"Unknown URL ({url}).", code="unknown_url")
    if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return TooLarge(f"{error.detail}.", param="file" if request.url.path == UPLOADS else None)
    fault = BadRequest(f"{error.detail} ({url}).", code="invalid_request")
    fault.status = error.status_code
    return fault


def _body_model(request: Request) -> type[BaseModel] | None:
    """The model that the request's body was to be."""
    route = request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    annotation = field.field_info.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
