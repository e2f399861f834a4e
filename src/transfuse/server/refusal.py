"""Answers requests that never reach a route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from transfuse.server.error_shapes import error_content

Header = tuple[bytes, bytes]

CLOSE: Final[Header] = (b"connection", b"close")
# A connection that is closed while its client still sends is reset, and the client may never read the answer. So what
# it sends is taken in and dropped first, within these bounds.
_MAX_DISCARDED_BYTES = 64 * 1024**2
_MAX_DISCARD_SECONDS = 2.0


async def refuse(
    scope: Scope,
    receive: Receive | None,
    send: Send,
    *,
    status: int,
    message: str,
    code: str,
    headers: Iterable[Header] = (),
) -> None:
    """Answers with an error and ends the connection.

    Args:
        scope: of the request.
        receive: where the rest of its body comes from; None where all of it has been read.
        send: where the answer goes.
        status: HTTP status.
        message: what was wrong, the limit, and what to do.
        code: what clients may branch on.
        headers: further headers.
    """
    if receive is not None:
        await _discard_body(scope, receive)
    kind = "invalid_request_error" if status < 500 else "server_error"
    detail = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps(error_content(scope, status, detail)).encode()
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            CLOSE,
            *headers,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def _discard_body(scope: Scope, receive: Receive) -> None:
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # the client waits for leave to send its body, and asking for the body would give it
    num_bytes = 0
    try:
        async with asyncio.timeout(_MAX_DISCARD_SECONDS):
            while num_bytes < _MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):  # the end of the body, or a client that has left
                    return
    except TimeoutError:
        return
