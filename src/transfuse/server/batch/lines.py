"""A line of a batch file as a request, and what is written of its answer."""

from __future__ import annotations

import uuid
from typing import Any, Final

import msgspec

from transfuse.errors import RequestError

_MAX_SHOWN: Final = 200


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of a batch.

    Attributes:
        custom_id: the client's name for it.
        method: of the HTTP request.
        url: the route.
        body: JSON of the request's body, as it stands in the line.
    """

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineError(RequestError):
    """A line is no request that could be sent.

    Attributes:
        code: what programs may branch on.
        custom_id: of the line, where it can be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


def read_line(line: bytes) -> BatchLine:
    """The request in a line, whose route there may not be.

    Args:
        line: JSON.

    Raises:
        LineError: it is no such request; the message says why.
    """
    try:
        found = msgspec.json.decode(line, type=BatchLine)
        streamed = msgspec.json.decode(found.body, type=_Streamed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LineError(
            "invalid_line",
            f"The line is no request of a batch: {error}. Each line is an object with custom_id, method, url and body.",
            custom_id_of(line),
        ) from error
    if found.method != "POST":
        raise LineError("invalid_method", f"method is {_cut(found.method)}; expected 'POST'.", found.custom_id)
    if not found.url.startswith("/"):
        message = f"url is {_cut(found.url)}; expected a route, such as '/v1/chat/completions'."
        raise LineError("invalid_url", message, found.custom_id)
    if streamed.stream:
        raise LineError("invalid_stream", "A batch has no streams; leave stream out of the body.", found.custom_id)
    return found


def custom_id_of(line: bytes) -> str | None:
    """What a line, or an answer, calls itself, if that can be read."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """What is written of an HTTP answer, errors of the route's among them, with the line break.

    Args:
        custom_id: of the request.
        status: of the answer.
        request_id: of the answer.
        body: JSON.
    """
    return _encode(_Answer(_new_id(), custom_id, _Response(status, request_id, msgspec.Raw(body)), None))


def error_line(error: LineError) -> bytes:
    """What is written of a line that is no request, with the line break."""
    return _encode(_Answer(_new_id(), error.custom_id, None, _Error(error.code, str(error))))


def _encode(answer: _Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
