"""Rebuilds what a chat template is given out of plain JSON types: a template is not trusted with anything else."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from transfuse.errors import PromptError


def to_conversation(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Messages as plain data, without the keys whose value is None: templates know a missing key, but not None.

    Raises:
        PromptError: there is no message, or one is no mapping.
    """
    plain = [to_plain(message) for message in messages]
    if not plain:
        raise PromptError("The conversation has no messages; send at least one.")
    for index, message in enumerate(plain):
        if not isinstance(message, dict):
            raise PromptError(f"message {index} is a {type(message).__name__}; expected an object with a role.")
    return [{key: value for key, value in message.items() if value is not None} for message in plain]


def to_plain(value: Any) -> Any:
    """A copy in which everything is a plain JSON type; what is none becomes its type's name, such as `<Image>`."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    # Subclasses, such as enums, may have methods that a template must not call.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    return _object_to_plain(value)


def _object_to_plain(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return to_plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return to_plain(dump())
    return f"<{type(value).__name__}>"
