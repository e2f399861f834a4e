"""Turns whatever goes wrong into an HTTP status and the body that the client's API has for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from transfuse.errors import (
    CapacityError,
    EngineClosedError,
    EngineDeadError,
    EngineUnavailableError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
    StructuredOutputsError,
    TransfuseError,
    WrongTaskError,
)
from transfuse.server.error_shapes import error_content

log = logging.getLogger(__name__)

# As nginx calls it when nobody is left to send a status to.
CLIENT_LEFT = 499
_RETRY_AFTER_UNAVAILABLE = 5  # seconds; a core that died is back by then, if its model is not large
_MAX_NAME = 200
_MAX_SHOWN_ERRORS = 3


class FieldError(RequestError):
    """A field of the request cannot be served.

    Attributes:
        field: its name.
        code: what clients may branch on.
    """

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"There is no model {_cut(name)!r} here; this server has {', '.join(map(repr, served))}.")


class NotStoredError(RequestError):
    """The request names something that the server does not remember."""


class ErrorDetail(BaseModel):
    """What went wrong.

    Attributes:
        message: what was wrong, where, the limit, and what to do.
        type: the kind of fault.
        param: the field of the request that is at fault.
        code: what clients may branch on.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as HTTP says it.

    Attributes:
        status: HTTP status.
        detail: what the body says.
        headers: further headers.
    """

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self, scope: Scope) -> str:
        """The body for the client of a request, in ASCII: what it quotes may be no valid Unicode."""
        return json.dumps(error_content(scope, self.status, self.detail.model_dump()))

    def response(self, scope: Scope) -> Response:
        """The answer to it."""
        return Response(self.json(scope), self.status, dict(self.headers), media_type="application/json")


def invalid_request(message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> Problem:
    """A fault of the client's."""
    detail = ErrorDetail(message=message, type="invalid_request_error", param=param, code=code)
    return Problem(status, detail)


def problem_of(error: Exception, request_id: str) -> Problem:
    """What to tell the client of an error; of the server's own faults only that its log says more."""
    match error:
        case SamplingParamsError():
            return invalid_request(str(error).removeprefix("SamplingParams."), param=error.field)
        case FieldError():
            return invalid_request(str(error), param=error.field, code=error.code)
        case UnknownModelError():
            return invalid_request(str(error), status=404, param="model", code="model_not_found")
        case NotStoredError():
            return invalid_request(str(error), status=404, code="not_found")
        case StructuredOutputsError():
            return invalid_request(str(error), code="invalid_structured_outputs")
        case CapacityError():
            return invalid_request(str(error), code="context_length_exceeded")
        case WrongTaskError():
            return invalid_request(str(error), code="wrong_task")
        case RequestError():
            return invalid_request(str(error))
        case QueueFullError():
            detail = ErrorDetail(message=str(error), type="rate_limit_error", code="queue_full")
            return Problem(429, detail, {"Retry-After": str(error.retry_after)})
        case EngineUnavailableError() | EngineDeadError() | EngineClosedError():
            detail = ErrorDetail(message=str(error), type="server_error", code="engine_unavailable")
            return Problem(503, detail, {"Retry-After": str(_RETRY_AFTER_UNAVAILABLE)})
        case NonFiniteLogitsError():
            # The request's own error, in words of ours: nothing of the model's code is in them.
            detail = ErrorDetail(message=str(error), type="server_error", code="non_finite_logits")
            return Problem(500, detail)
    message = f"The server failed to answer request {request_id}; its log says why."
    return Problem(500, ErrorDetail(message=message, type="server_error", code="internal_error"))


def logged_problem_of(error: Exception, request_id: str) -> Problem:
    """`problem_of`, with a log entry where that is promised."""
    problem = problem_of(error, request_id)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("Request %s failed.", request_id, exc_info=error)
    return problem


def request_id_of(request: Request) -> str:
    """The id that the outermost middleware gave the request."""
    return str(request.scope["state"]["request_id"])


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app the one shape."""
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(TransfuseError, _answer_transfuse_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_exception)


async def _answer_transfuse_error(request: Request, error: Exception) -> Response:
    return logged_problem_of(error, request_id_of(request)).response(request.scope)


async def _answer_exception(request: Request, error: Exception) -> Response:
    # Starlette raises it again once this is sent, and the outermost middleware logs it.
    return problem_of(error, request_id_of(request)).response(request.scope)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client has left; the status is for the log."""
    return Response(status_code=CLIENT_LEFT)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if message == HTTPStatus(error.status_code).phrase:
        message = _say_status(request, error)
    problem = invalid_request(message, status=error.status_code)
    return Problem(problem.status, problem.detail, error.headers or {}).response(request.scope)


def _say_status(request: Request, error: HTTPException) -> str:
    path = _cut(request.url.path)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return f"There is no route {path}; GET /openapi.json lists those that there are."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{path} does not take {_cut(request.method)}; use {(error.headers or {}).get('Allow', 'another')}."
    return f"{error.detail}."


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    message = " ".join(_say_validation_error(one) for one in errors[:_MAX_SHOWN_ERRORS])
    if (num_more := len(errors) - _MAX_SHOWN_ERRORS) > 0:
        message += f" And {num_more} more."
    code = errors[0]["ctx"].get("code") if "ctx" in errors[0] else None
    return invalid_request(message, param=_path(errors[0]["loc"]), code=code).response(request.scope)


def _say_validation_error(error: Mapping[str, Any]) -> str:
    kind, path = error["type"], _path(error["loc"])
    if kind == "json_invalid":
        return f"The body is no valid JSON: {error['ctx']['error']}."
    if path is None:
        return "Send a JSON object as the body, with the header Content-Type: application/json."
    if kind == "extra_forbidden":
        return f"There is no field {path}; leave it out."
    if kind == "missing":
        return f"The field {path} is missing."
    message = str(error["msg"]).removeprefix("Value error, ").removesuffix(".")
    if kind in ("value_error", "refused"):
        return f"{path}: {message}."
    return f"{path}: {message}, got {_describe(error['input'])}."


def _path(location: Sequence[str | int]) -> str | None:
    """`("body", "messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return _cut(path) or None


def _describe(value: object) -> str:
    """What was given, without the text of anyone's prompt."""
    if isinstance(value, bool | None):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**30 or value != value else "a huge number"
    return "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"


def _cut(text: str) -> str:
    """Names that clients choose, cut so that they do not fill the message."""
    return text if len(text) <= _MAX_NAME else text[:_MAX_NAME] + "..."
