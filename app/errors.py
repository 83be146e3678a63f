"""Errors of the service: OpenAI's error body, `{"error": {message, type, param, code}}`.

ServiceError             500 server_error
├── BadRequest           400 invalid_request_error
│   ├── NotFound         404 code not_found
│   ├── JobConflict      400 code job_conflict: the job's state forbids it
│   └── TooLarge         413 code file_too_large
├── Unauthorized         401 code invalid_api_key
├── Forbidden            403 code insufficient_permissions
├── RateLimited          429 code rate_limit_exceeded
├── Unavailable          503 server_error: a part that is needed is away
└── LeaseLost            never seen by a client: this attempt has been superseded
"""

from typing import Any, ClassVar


class ServiceError(Exception):
    """What a client is told. The message holds the remedy; it names no local path."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.extra = extra
        """Further keys of the error body, such as every fault of an upload."""

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}


class BadRequest(ServiceError):
    """The request cannot be carried out as it is; `param` names the field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class NotFound(BadRequest):
    """No such thing, or not the caller's."""

    status = 404
    code = "not_found"


class JobConflict(BadRequest):
    """The job is in a state that does not allow this. 400, since the SDK repeats a bare 409."""

    code = "job_conflict"


class TooLarge(BadRequest):
    """An upload above the limit."""

    status = 413
    code = "file_too_large"


class Unauthorized(ServiceError):
    """No key, or none that opens anything: unknown, expired and revoked ones are told the same."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"www-authenticate": "Bearer"}


class Forbidden(ServiceError):
    """The key is known, and does not reach so far."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class RateLimited(ServiceError):
    """The key has sent too much for now; the headers say when it may go on."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class Unavailable(ServiceError):
    """A part that this needs is away: database, broker, storage."""

    status = 503
    code = "unavailable"


class LeaseLost(ServiceError):
    """The job is no longer this attempt's: cancelled, finished, or given to another worker."""

    code = "lease_lost"
