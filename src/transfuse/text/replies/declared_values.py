"""Values of the fields that a tokenizer's response template declares."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import regex

from transfuse.text.replies.calls import NoCallError, read_json
from transfuse.text.replies.python_calls import python_calls

# Patterns come with checkpoints and meet whatever models write: none may hold up a server.
PATTERN_SECONDS: Final = 0.5
PARSERS: Final = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-call-list")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
# It matches at every quote, ended or not, so that no text is looked at twice.
_JSON_STRING: Final = r'"(?:\\.|[^"\\])*+(?:"|\\?\Z)'
_BARE_KEY: Final = r"(?<=[{,])\s*(?P<key>\w+)\s*:"


def read_value(text: str, parser: str, args: Mapping[str, Any]) -> Any:
    """The value of a field's text.

    Args:
        text: what stands in the field.
        parser: one of `PARSERS`.
        args: its `content_args`.

    Raises:
        NoCallError: the text is no such value.
    """
    plain = text.strip() if args.get("strip", True) else text
    try:
        match parser:
            case "text":
                return plain
            case "int":
                return int(plain)
            case "float":
                return float(plain)
            case "bool":
                return plain.lower() in ("true", "1")
            case "json":
                return _read_json(text, plain, args)
            case "xml-inline":
                return _read_tags(text, args)
            case "kv-lines":
                return _read_lines(text, args)
    except (ValueError, KeyError, TypeError, AttributeError, regex.error, TimeoutError) as error:
        raise NoCallError(f"no {parser}") from error
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in python_calls(text)]


def _read_json(text: str, plain: str, args: Mapping[str, Any]) -> Any:
    delimiters = args.get("string_delims", [])
    strings = [f"{re.escape(start)}(?P<s{index}>.*?){re.escape(end)}" for index, (start, end) in enumerate(delimiters)]
    keys = [_BARE_KEY] if args.get("unquoted_keys") else []

    def as_json(match: regex.Match[str]) -> str:
        name = match.lastgroup
        if name is None:
            return str(match[0])
        return f"{json.dumps(match[name])}:" if name == "key" else json.dumps(match[name])

    try:
        pattern = "|".join([*strings, _JSON_STRING, *keys])
        return read_json(regex.sub(pattern, as_json, text, flags=regex.DOTALL, timeout=PATTERN_SECONDS))
    except NoCallError:
        if args.get("allow_non_json"):
            return plain
        raise


def _read_tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=PATTERN_SECONDS):
        found = match.groupdict()
        values.setdefault(found["key"], []).append(_inner(found.get("value") or "", args))
    merges = bool(args.get("merge_duplicates"))
    return {key: found if merges and len(found) > 1 else found[-1] for key, found in values.items()}


def _read_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    separator = args.get("kv_sep", ":")
    lines = [line.partition(separator) for line in text.split(args.get("line_sep", "\n")) if separator in line]
    return {key.strip(): _inner(value.strip(), args) for key, _, value in lines}


def _inner(text: str, args: Mapping[str, Any]) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else read_value(text, parser.get("name", "text"), parser.get("args", {}))


def transform(shape: Any, scope: Mapping[str, Any]) -> Any:
    """A shape with its placeholders, such as `{content}` or `{content.name}`, replaced by values.

    Raises:
        NoCallError: there is no such value.
    """
    if isinstance(shape, dict):
        return {key: transform(value, scope) for key, value in shape.items()}
    if isinstance(shape, list):
        return [transform(value, scope) for value in shape]
    match = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if match is None:
        return shape
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise NoCallError(f"no {match[1]}")
        value = value[key]
    return value
