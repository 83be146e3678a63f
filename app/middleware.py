"""Around every request: its id, its line in the log, an answer even to what nobody expected, a limit to its body."""

import logging
import re
import time

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Scope_

from app import logs
from app.answers import UPLOADS, answer
from app.callers import Scope, acting_for
from app.ids import new_id
from app.keys import quotas
from app.keys import service as keys
from app.settings import get_settings

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PROBES = frozenset({"/livez", "/readyz"})
PUBLIC = PROBES | {"/docs", "/openapi.json"}
"""What tells nothing of anybody's."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_JSON_BYTES = 4 * 1024**2
MULTIPART_BYTES = 64 * 1024
"""What an upload's body may have beyond its file: boundaries, other fields."""


class RequestContext:
    """Puts x-request-id on every response: the client's own if it is sane, so that its logs and ours meet."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope_, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if SANE.fullmatch(given) else new_id("req_")
        status: int | None = None
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with logs.bound(logs.request_id, request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except ClientDisconnect:
                pass
            except Exception as error:
                if status is not None:  # too late for another answer; the server breaks the connection off
                    raise
                await answer(Request(scope), error)(scope, receive, send_with_id)
            finally:
                level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
                taken_ms = (time.monotonic() - began) * 1000
                logger.log(level, "%s %s %s %.0f ms", scope["method"], scope["path"], status or "gone", taken_ms)


class Authentication:
    """Nobody gets past without a key, once there are keys: not to a route, nor to learn that there is none.

    It stands before the body is read, so that strangers cannot fill the disk, and around all routes, so that none
    can be left out. The scope follows from the method; a route that wants more asks for it itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope_, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in PUBLIC:
            await self.app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization")
        server = scope.get("server")
        caller = await run_in_threadpool(keys.authenticate, authorization, reached_at=server and server[0])
        with acting_for(caller):
            keys.permit(caller, Scope.READ if scope.get("method", "GET") in READING else Scope.WRITE)
            window = await run_in_threadpool(quotas.count_request, caller)

            async def send_with_limit(message: Message) -> None:
                if window is not None and message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(window.headers())
                await send(message)

            await self.app(scope, receive, send_with_limit)


class BodyLimit:
    """Stops reading a body at its limit, whatever length it claims: 413."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope_, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload = scope["path"] == UPLOADS
        limit = get_settings().max_upload_bytes + MULTIPART_BYTES if upload else MAX_JSON_BYTES
        too_large = HTTPException(413, f"The body is above the limit of {limit} bytes")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise too_large
            return message

        await self.app(scope, counted_receive, send)
