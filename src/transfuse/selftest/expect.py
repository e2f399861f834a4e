"""What is expected of an answer, and the words for where it differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

_MAX_SHOWN = 200
_MAX_ERRORS = 3


class Difference(Exception):
    """An answer is not what the client needs; the message says where."""


def expect(holds: object, difference: str) -> None:
    """Raises `Difference` unless something holds."""
    if not holds:
        raise Difference(difference)


def typed(kind: Any, data: Any, what: str) -> Any:
    """The data as an official client reads it, which looks at every field that it knows.

    Args:
        kind: a type of the `openai` or the `anthropic` package.
        data: what JSON holds.
        what: the data's name in a difference.

    Raises:
        Difference: fields are missing or hold something else.
    """
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[:_MAX_ERRORS]
        said = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in found)
        raise Difference(f"{what} is not of the type {_name(kind)}: {said}") from error


def json_object(text: object, what: str) -> dict[str, Any]:
    """The object that a text holds as JSON.

    Raises:
        Difference: it holds none.
    """
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Difference(f"{what} should be the JSON of an object, and is {shown(text)}")
    return found


def mapping(value: object) -> Mapping[str, Any]:
    """A value that should be an object; empty where it is none."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """The objects of a value that should be a list of them."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def shown(value: object) -> str:
    """A value, cut so that it does not fill the message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _name(kind: Any) -> str:
    if hasattr(kind, "__name__"):
        return str(kind.__name__)
    # A union says what it is by what tells its members apart.
    return "event" if "Event" in str(kind) else str(kind)[:_MAX_SHOWN]
