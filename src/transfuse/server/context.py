"""The outermost layer: gives each request an id, counts it, logs it, and lets no error past."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transfuse.server.error_shapes import speaks_anthropic
from transfuse.server.lifecycle import PROBE_PATHS
from transfuse.server.metrics import Metrics
from transfuse.server.observe import RequestRecord
from transfuse.server.refusal import refuse

log = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# As nginx calls it when nobody is left to send a status to.
CLIENT_LEFT: Final = 499
UNMATCHED: Final = "unmatched"
# The one route that is the framework's own, and leaves no template behind.
_SCHEMA_PATH: Final = "/openapi.json"


class ContextMiddleware:
    """Puts `request_id` and `record` into the request's state, and writes one log line at the end of each response.

    Args:
        app: everything else.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands on, and sees to the end of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(self._metrics, _request_id(scope), time.monotonic())
        scope.setdefault("state", {}).update(request_id=record.request_id, record=record)
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = record.request_id.encode()
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if speaks_anthropic(scope):
                    headers.append((b"request-id", request_id))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.debug("the client of request %s has left", record.request_id)
        except Exception as error:
            record.error = type(error).__name__
            log.error("Request %s failed.", record.request_id, exc_info=error)
            if status is None:
                await refuse(
                    scope,
                    None,
                    send_with_id,
                    status=500,
                    message=f"The server failed to answer request {record.request_id}; its log says why.",
                    code="internal_error",
                )
            # Where the answer had begun, it stays without an end: the server then cuts the connection.
        finally:
            self._finish(scope, record, CLIENT_LEFT if status is None else status)

    def _finish(self, scope: Scope, record: RequestRecord, status: int) -> None:
        route = getattr(scope.get("route"), "path", _SCHEMA_PATH if scope["path"] == _SCHEMA_PATH else UNMATCHED)
        self._metrics.count_http_request(scope["method"], route, status)
        if scope["path"] in PROBE_PATHS and status != 401:
            return  # asked every few seconds, and of no interest afterwards
        facts = {
            "id": record.request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            **record.facts(),
            "e2e_ms": round((time.monotonic() - record.start_time) * 1000, 1),
        }
        log.info("request", extra={"facts": facts})


def _request_id(scope: Scope) -> str:
    """The client's id, if it is one that may stand in logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
