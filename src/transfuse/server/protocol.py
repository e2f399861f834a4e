"""Uvicorn's HTTP protocol, with bounds on how long and how often clients may be there without saying anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from transfuse.server.error_shapes import openai_error
from transfuse.server.limits import MAX_HEADER_BYTES

_RETRY_AFTER: Final = (b"retry-after", b"1")
_LINGER_SECONDS: Final = 1.0


class LimitedProtocol(H11Protocol):
    """One connection.

    Attributes:
        max_connections: at this many, further ones are answered 503.
        head_timeout: seconds in which a request's line and headers have to arrive, from their first byte on; on a new
            connection, from its start on.
        write_timeout: seconds that a client may take nothing of its response.
    """

    max_connections = 1000
    head_timeout = 15.0
    write_timeout = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            message = f"The server has {self.max_connections} connections, its limit. Close some, or try again later."
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, message, "too_many_connections", [_RETRY_AFTER])
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._limit_head(None)
        self._limit_write(None)

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._refused:
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """The response has been sent to its end; the next request may begin, and may have begun."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # else the connection is idle, which has a longer limit
            self._watch_head()

    def pause_writing(self) -> None:
        """The client takes its response more slowly than it is made."""
        super().pause_writing()
        self._limit_write(self.write_timeout)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._limit_write(None)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP request, or has too long a head."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # a response is under way, into which no other may be written
            return
        error = sys.exception()  # uvicorn calls this while it handles the error, and tells no more of it
        if (
            isinstance(error, h11.RemoteProtocolError)
            and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        ):
            message = f"The request's line and headers are longer than {MAX_HEADER_BYTES} bytes. Send fewer."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "headers_too_large")
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "This is no valid HTTP request.", "invalid_http")

    def _watch_head(self) -> None:
        """Starts the clock where the client is to send a head, stops it where it has done so."""
        if self._refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._limit_head(None)
        elif self._head_timer is None:
            self._limit_head(self.head_timeout)

    def _limit_head(self, seconds: float | None) -> None:
        """Ends the connection after so long; None: no more."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.close)

    def _limit_write(self, seconds: float | None) -> None:
        """Cuts the connection off after so long; None: no more."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _refuse(self, status: HTTPStatus, message: str, code: str, headers: Any = ()) -> None:
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        # Which API the client speaks is not known yet.
        body = json.dumps(openai_error(message, kind, None, code)).encode()
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *headers,
        ]
        # Written without h11, whose state may not allow an answer before a request.
        lines = [b"HTTP/1.1 %d %s" % (status, STATUS_PHRASES[status]), *(b"%s: %s" % pair for pair in head)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        # What the client still sends is dropped for a while: closed at once, the connection would be reset, and the
        # answer lost.
        self._refused = True
        with contextlib.suppress(OSError):  # the client is gone already
            self.transport.write_eof()
        self._limit_head(_LINGER_SECONDS)
