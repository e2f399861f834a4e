"""What is expected of answers that are no streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anthropic.types import ErrorResponse, Message

from transfuse.selftest.expect import Difference, expect, shown, typed
from transfuse.selftest.wire import Answer


def message_of(answer: Answer) -> Message:
    """Anthropic's message."""
    message = typed(Message, answer.good(), "the answer")
    assert isinstance(message, Message)
    return message


def listed(answer: Answer) -> list[Any]:
    """What a list of both APIs holds; it must hold something."""
    said = answer.good()
    found = said.get("data") if isinstance(said, dict) else None
    if not isinstance(found, list) or not found:
        raise Difference(f"there is nothing in data: {shown(said)}")
    return found


def refused_by_anthropic(answer: Answer, status: int, kind: str) -> str:
    """The message of an error of Anthropic's shape.

    Args:
        answer: to a request that cannot be served.
        status: what HTTP must say.
        kind: what the error must be.
    """
    _check_status(answer, status)
    error = typed(ErrorResponse, answer.json(), "the error")
    expect(error.error.type == kind, f"the error's type is {error.error.type!r} instead of {kind!r}")
    return str(error.error.message)


def refused_by_openai(answer: Answer, status: int) -> Mapping[str, Any]:
    """An error of OpenAI's shape.

    Args:
        answer: to a request that cannot be served.
        status: what HTTP must say.
    """
    _check_status(answer, status)
    said = answer.json()
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise Difference(f"an error is {{error: {{message, type, param, code}}}}, and this is {shown(said)}")
    missing = sorted({"type", "param", "code"} - set(error))
    expect(not missing, f"the error lacks {', '.join(missing)}")
    return error


def _check_status(answer: Answer, status: int) -> None:
    said = answer.body.decode(errors="replace")
    expect(answer.status == status, f"status {answer.status} instead of {status}: {shown(said)}")
