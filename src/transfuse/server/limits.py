"""Bounds on a request before anything reads it: headers, and the body's size, time, type and shape."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transfuse.server.json_guard import JsonError, JsonGuard
from transfuse.server.refusal import Header, refuse
from transfuse.server.settings import ServerSettings

MAX_HEADERS: Final = 100
MAX_HEADER_BYTES: Final = 16 * 1024
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})


class _RefusedError(Exception):
    """The request is answered with an error; the arguments are what `refuse` takes."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class LimitsMiddleware:
    """Reads the whole body within its bounds, then hands on the request as if the body came in one piece.

    Args:
        app: what receives only requests within the bounds.
        settings: the bounds.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error, or hands on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        all_read = False

        async def watched() -> Message:
            nonlocal all_read
            message = await receive()
            all_read = not message.get("more_body", False)
            return message

        try:
            _check_headers(scope["headers"])
            body = await self._read(scope, watched)
        except _RefusedError as error:
            rest = None if all_read else receive
            await refuse(scope, rest, send, status=error.status, message=error.message, code=error.code)
            return
        if body is None:
            return  # the client left

        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client left while sending it."""
        headers = dict(scope["headers"])
        if scope["method"] in _WITHOUT_BODY and not headers.keys() & {b"content-length", b"transfer-encoding"}:
            return b""
        if scope["method"] not in _WITHOUT_BODY:
            _check_type(headers)
        if int(headers.get(b"content-length", b"0")) > self._settings.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                return await self._collect(receive)
        except TimeoutError:
            raise _RefusedError(
                408,
                f"The body did not arrive within {self._settings.body_timeout:g} s. Send it faster, or less.",
                "request_timeout",
            ) from None
        except JsonError as error:
            raise _RefusedError(400, str(error), "invalid_json") from error

    async def _collect(self, receive: Receive) -> bytes | None:
        guard = JsonGuard(self._settings.max_json_depth)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk: bytes = message.get("body", b"")
            final = not message.get("more_body", False)
            if len(body) + len(chunk) > self._settings.max_body_bytes:
                raise self._too_large()
            guard.feed(chunk, final=final)
            body += chunk
            if final:
                return bytes(body)

    def _too_large(self) -> _RefusedError:
        return _RefusedError(
            413,
            f"The body is larger than {self._settings.max_body_bytes} bytes. Send less, or raise --max-body-bytes.",
            "request_too_large",
        )


def _check_headers(headers: list[Header]) -> None:
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise _RefusedError(
            431,
            f"The request has {len(headers)} headers of {size} bytes; at most {MAX_HEADERS} of {MAX_HEADER_BYTES} "
            "bytes are taken. Send fewer.",
            "headers_too_large",
        )


def _check_type(headers: dict[bytes, bytes]) -> None:
    kind, _, parameters = headers.get(b"content-type", b"").partition(b";")
    charset = parameters.replace(b" ", b"").replace(b'"', b"").lower()
    if kind.strip().lower() != b"application/json" or charset not in {b"", b"charset=utf-8"}:
        raise _RefusedError(
            415,
            "The body must be JSON in UTF-8, and say so. Send the header `Content-Type: application/json`.",
            "unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise _RefusedError(
            415, "The body is compressed, which is not taken. Send it as it is.", "unsupported_encoding"
        )
