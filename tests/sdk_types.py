"""Holds JSON against the types of an official client: nothing missing, nothing that the client does not know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter


def checked(kind: Any, data: Any) -> Any:
    """The data as an object of the type, which has a field for everything in it."""
    parsed = TypeAdapter(kind).validate_python(data)
    unknown = list(_unknown(parsed, ""))
    assert not unknown, f"{kind} has no {unknown}"
    return parsed


def _unknown(value: Any, path: str) -> Any:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, f"{path}[{index}]")
