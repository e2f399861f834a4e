"""Calls as data, out of the JSON and the text that models write them in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_ID_KEYS = ("id", "tool_call_id")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_NAME = 256


class NoCallError(ValueError):
    """The text is no call, or no whole one."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model wrote.

    Attributes:
        name: of the tool.
        arguments: JSON of an object.
        id: as the model gave it; None where it did not.
    """

    name: str
    arguments: str
    id: str | None = None


def call_of(name: object, arguments: object, call_id: object = None) -> Call:
    """A call, if its parts are what they should be.

    Args:
        name: text.
        arguments: an object, or its JSON.
        call_id: text, if there is one.

    Raises:
        NoCallError: they are not.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise NoCallError("no name")
    if isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise NoCallError("the arguments are no object")
    usable_id = call_id if isinstance(call_id, str) and 0 < len(call_id) <= MAX_NAME else None
    return Call(_printable(name), to_json(arguments), None if usable_id is None else _printable(usable_id))


def calls_of(value: object) -> list[Call]:
    """The calls in an object with a name and arguments, under any of their usual names, or in a list of such objects.

    Raises:
        NoCallError: one of them is none, or there is none.
    """
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise NoCallError("no calls")
    return [_call_in(one) for one in objects]


def _call_in(value: object) -> Call:
    if not isinstance(value, dict):
        raise NoCallError("no object")
    inner = value.get("function")
    body = inner if isinstance(inner, dict) else value
    arguments = _first(body, _ARGUMENT_KEYS)
    return call_of(_first(body, _NAME_KEYS), {} if arguments is None else arguments, _first(value, _ID_KEYS))


def _first(value: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def read_json(text: str) -> Any:
    """The value of a JSON text, in which strings may hold line breaks as they are: models write them so.

    Raises:
        NoCallError: it is none.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoCallError("no JSON") from error


def to_json(value: Any) -> str:
    """A value as JSON that every reader takes.

    Raises:
        NoCallError: JSON has no way to write it.
    """
    try:
        return _printable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise NoCallError("not to be written as JSON") from error


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """A value that was written as bare text, as the type that its schema names first and that it can be.

    Without a schema, and where it can be none of them, it is text.
    """
    for kind in _types(schema):
        if kind == "string":
            return text
        value = _as_python(text.strip())
        if _is(value, kind):
            return value
        if kind in ("integer", "number") and isinstance(value, float) and value.is_integer():
            return int(value)
    return text


def _types(schema: Mapping[str, Any] | None) -> list[str]:
    """The types that a schema allows, text last: anything can be that."""
    if schema is None:
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared) if isinstance(declared, list) else []
    for union in ("anyOf", "oneOf"):
        members = schema.get(union)
        for member in members if isinstance(members, list) else []:
            types += _types(member) if isinstance(member, Mapping) else []
    values = schema.get("enum")
    if not types and isinstance(values, list):
        types = ["string"] if all(isinstance(value, str) for value in values) else ["any"]
    return sorted((kind for kind in types if isinstance(kind, str)), key=lambda kind: kind == "string")


def _as_python(text: str) -> Any:
    """A JSON value, or one of Python's constants, in whatever case; the text where it is neither."""
    constants = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return read_json(text)
    except NoCallError:
        return text


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case _:
            return kind == "any"


def _printable(text: str) -> str:
    """Without halves of characters, which no encoding can carry."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")
