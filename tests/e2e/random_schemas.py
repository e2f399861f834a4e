"""JSON schemas of varied kinds, made at random from a number; a few ask for what is not supported."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ["a", "b c", "naïve", "x-1", '"quoted"', "日本", "type", "$id2", ""]
PATTERNS = ["^[a-z]{2,5}$", "^(red|green|blue)$", "^[0-9]{3}-[0-9]{2}$", "^a+b?$", "[xyz]", "^\\w+@\\w+$", "^é{1,3}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration", "hostname", "uri"]
SCALARS: list[Any] = [None, True, False, 0, -1.5, 1e21, "", "x", "two\nlines", "🙂", '"\\', [1, "a"], {"k": None}]
UNSUPPORTED: list[Schema] = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2},
    {"not": {"type": "integer"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "array", "unevaluatedItems": False},
    {"type": "array", "contains": {"const": 1}, "minContains": 2},
    {"$dynamicRef": "#node"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "integer", "divisibleBy": 3},
    {"type": "string", "format": "no-such-format"},
    {"type": "string", "format": "json-pointer"},
]


def random_schema(number: int) -> Schema:
    """The schema of this number."""
    source = random.Random(number)
    if number % 10 == 9:
        return source.choice(UNSUPPORTED)
    if number % 10 == 8:
        return _with_definitions(source)
    if number % 10 == 7:
        return source.choice([_expression, _tree, _shapes, _order, _extended, _restricted])(source)
    return _schema(source, source.randint(0, 3))


def _schema(source: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _plain, _enum]
    if depth > 0:
        kinds += [_object, _object, _object, _array, _array, _tuple, _union, _both]
    return source.choice(kinds)(source, depth)


def _string(source: random.Random, _: int) -> Schema:
    kind = source.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": source.choice(FORMATS)}
    low = source.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + source.randint(0, 9)}


def _integer(source: random.Random, _: int) -> Schema:
    low = source.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 5000)}
    if source.random() < 0.3:
        schema |= {"multipleOf": source.choice([2, 5, 7]), "maximum": low + 5000}
    if source.random() < 0.2:
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


def _number(source: random.Random, _: int) -> Schema:
    low = round(source.uniform(-50, 50), 2)
    high = round(low + source.uniform(0.5, 90), 3)
    return source.choice(
        [{"type": "number", "minimum": low, "maximum": high}, {"type": "number", "exclusiveMinimum": low}]
    )


def _plain(source: random.Random, _: int) -> Schema:
    return source.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"const": SCALARS[7]}])


def _enum(source: random.Random, _: int) -> Schema:
    values = source.sample(SCALARS, source.randint(1, 5))
    return {"const": values[0]} if len(values) == 1 else {"enum": values, "title": "One of", "description": "said"}


def _object(source: random.Random, depth: int) -> Schema:
    names = source.sample(NAMES, source.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(source, depth - 1) for name in names},
        "required": [name for name in names if source.random() < 0.7],
    }
    extra = source.randrange(4)
    if extra < 2:
        schema["additionalProperties"] = False
    elif extra == 2:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 99}
    else:
        schema |= {"patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False}
    return schema


def _array(source: random.Random, depth: int) -> Schema:
    low = source.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(source, depth - 1),
        "minItems": low,
        "maxItems": low + source.randint(0, 3),
    }


def _tuple(source: random.Random, depth: int) -> Schema:
    parts = [_schema(source, depth - 1) for _ in range(source.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(source: random.Random, depth: int) -> Schema:
    options = [_schema(source, depth - 1) for _ in range(source.randint(2, 3))]
    if source.random() < 0.3:
        return {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": str(i)}, "value": option}, "required": ["kind"]}
                | {"additionalProperties": False}
                for i, option in enumerate(options)
            ]
        }
    return {"anyOf": options}


def _both(source: random.Random, depth: int) -> Schema:
    first, second = _object(source, depth - 1 or 1), {"properties": {"z": {"type": "boolean"}}, "required": ["z"]}
    first.pop("additionalProperties", None)
    return {"allOf": [first | {"type": "object"}, second], "description": "both"}


def _with_definitions(source: random.Random) -> Schema:
    """A list that refers to itself, or definitions that are used several times."""
    if source.random() < 0.5:
        node = {
            "type": "object",
            "properties": {
                "value": _schema(source, 1),
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    return {
        "definitions": {"part": _schema(source, 1)},
        "type": "object",
        "properties": {name: {"$ref": "#/definitions/part"} for name in ("p", "q")},
        "required": ["p", "q"],
        "additionalProperties": False,
    }


def _expression(source: random.Random) -> Schema:
    """Definitions that refer to each other, one by an anchor."""
    operation = {
        "type": "object",
        "properties": {
            "op": {"enum": source.sample(["+", "-", "√", "max"], 2)},
            "args": {"type": "array", "items": {"$ref": "#value"}, "minItems": 1, "maxItems": source.randint(1, 2)},
        },
        "required": ["op", "args"],
        "additionalProperties": False,
    }
    value = {"$anchor": "value", "anyOf": [{"type": "integer", "maximum": 9}, {"$ref": "#/$defs/op~1eration"}]}
    return {"$defs": {"op/eration": operation, "value": value}, "$ref": "#/$defs/op~1eration"}


def _tree(source: random.Random) -> Schema:
    """Refers to itself as a whole."""
    return {
        "title": "Folder",
        "type": "object",
        "properties": {
            "name": _string(source, 0) | {"description": "of the folder", "default": "x", "examples": ["a", "b"]},
            "parts": {"type": "array", "items": {"$ref": "#"}, "maxItems": source.randint(1, 2)},
        },
        "required": ["name", "parts"],
        "additionalProperties": False,
    }


def _shapes(source: random.Random) -> Schema:
    """A union that its options' own constants tell apart, by reference."""
    shapes = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "size": _number(source, 0), "at": _tuple(source, 1)},
            "required": ["kind", "size"],
            "additionalProperties": False,
        }
        for name in ("circle", "Würfel", "面")
    }
    options = [{"$ref": f"#/$defs/{name}"} for name in shapes]
    return {"$defs": shapes, "type": "array", "items": {"oneOf": options}, "minItems": 1, "maxItems": 2}


def _order(source: random.Random) -> Schema:
    """What a shop may ask for: formats, prices in cents, lists of objects, values that may be null."""
    line = {
        "type": "object",
        "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "price": {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": source.choice([0.01, 0.5])},
            "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 10**15},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["sku", "price", "count", "note"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": source.choice(FORMATS)},
            "lines": {"type": "array", "items": line, "minItems": 1, "maxItems": 2},
            "paid": True,
            "tags": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
        },
        "required": ["id", "lines"],
        "additionalProperties": False,
    }


def _extended(source: random.Random) -> Schema:
    """Definitions joined by `allOf`, and a reference with more beside it."""
    named = {"type": "object", "properties": {"name": _string(source, 0)}, "required": ["name"]}
    aged = {"type": "object", "properties": {"age": {"$ref": "#/$defs/age", "maximum": 9}}, "required": ["age"]}
    definitions = {"named": named, "aged": aged, "age": {"type": "integer", "minimum": source.randint(0, 5)}}
    return {"$defs": definitions, "allOf": [{"$ref": "#/$defs/named"}, {"$ref": "#/$defs/aged"}]}


def _restricted(source: random.Random) -> Schema:
    """Keywords that join: of several types, of a pattern and lengths, of properties and their number."""
    return source.choice(
        [
            {"type": ["string", "integer", "array"], "maxLength": 3, "minimum": 3, "maximum": 9, "maxItems": 1},
            {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
            {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
            {"type": "object", "required": ["z"], "additionalProperties": {"enum": [{"a": 1}, [2], "x"]}},
            {"type": "array", "prefixItems": [{"type": "string", "maxLength": 2}], "items": _enum(source, 0)}
            | {"minItems": 2, "maxItems": 3},
            {"type": "number", "exclusiveMinimum": -1e-3, "exclusiveMaximum": 1e-3},
        ]
    )
