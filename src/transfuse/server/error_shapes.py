"""The JSON of an error, in the shape of the API that the client speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope

_ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API: by its path, or by the header that all its clients send."""
    path: str = scope["path"]
    if path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def openai_error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's API has it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """An error as Anthropic's API has it."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_content(scope: Scope, status: int, detail: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error, for the client that sent the request.

    Args:
        scope: of the request.
        status: HTTP status.
        detail: `message`, `type`, `param` and `code` as OpenAI has them.
    """
    if speaks_anthropic(scope):
        return anthropic_error(status, detail["message"], scope["state"]["request_id"])
    return openai_error(detail["message"], detail["type"], detail["param"], detail["code"])
