"""Log lines: a JSON object each on stdout, with the job and the request that it belongs to."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

job_id: ContextVar[str | None] = ContextVar("job_id", default=None)
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


SECRETS = re.compile(r"(?i)((?<![\w-])qerl-|whsec_|bearer\s+)[\w~+/.=-]{16,}")


class JsonFormatter(logging.Formatter):
    """One line a record; a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "job_id": job_id.get(),
            "request_id": request_id.get(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return redacted(json.dumps({name: value for name, value in line.items() if value is not None}))


def redacted(text: str) -> str:
    """The same without keys and secrets, whoever wrote them there."""
    return SECRETS.sub(lambda found: f"{found[1]}[redacted]", text)


def setup(level: int = logging.INFO) -> None:
    """Send this process's logs to stdout. Replaces whatever was set up before."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # started by hand, uvicorn has handlers of its own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"  # the middleware has its line for each request


@contextmanager
def bound(variable: ContextVar[str | None], value: str) -> Iterator[None]:
    """Name the job or request that lines logged inside belong to."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
