"""Schemas, expressions and grammars made to take time or memory, or to have no sentence; by name."""

from __future__ import annotations

from typing import Any


def _deep(depth: int, wrap: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def _object(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


def _array(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": inner, "minItems": 1}


def _words(count: int) -> list[str]:
    return [f"value-{i}-{i * 7919 % 10007}" for i in range(count)]


def _union(count: int) -> dict[str, Any]:
    return {"anyOf": [{**_object({"const": i}), "properties": {f"k{i}": {"type": "string"}}} for i in range(count)]}


def _doubling(depth: int) -> dict[str, Any]:
    levels = {
        f"l{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/l{i + 1}"} for key in "ab"}}
        for i in range(depth)
    }
    return {"$defs": levels | {f"l{depth}": {"type": "null"}}, "$ref": "#/$defs/l0"}


_SEARCHES = [{"type": "string", "pattern": f".*{char}.*"} for char in "abcdefghijklmnop"]
_STEPS = [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(8)]

SCHEMAS: dict[str, Any] = {
    "objects 100 deep": _deep(100, _object),
    "arrays 100 deep": _deep(100, _array),
    "mixed 120 deep": _deep(60, lambda inner: _object(_array(inner))),
    "enum of 1 MB": {"enum": _words(46_000)},
    "enum of long texts": {"enum": ["x" * 1000 + str(i) for i in range(900)]},
    "const of 900 kB": {"const": "x" * 900_000},
    "refers to itself": {"$ref": "#"},
    "refers in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "never ends": {"$defs": {"a": {**_object({"$ref": "#/$defs/a"})}}, "$ref": "#/$defs/a"},
    "refers to nothing": {"$ref": "#/$defs/none"},
    "refers to the network": {"$ref": "http://127.0.0.1:1/schema.json"},
    "doubles with each level": _doubling(30),
    "least length of a billion": {"type": "string", "minLength": 10**9},
    "greatest length of a billion": {"type": "string", "maxLength": 10**9},
    "least length above the greatest": {"type": "string", "minLength": 5, "maxLength": 1},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "a million items at most": {"type": "array", "items": {"type": "boolean"}, "maxItems": 10**6},
    "a million properties": {"type": "object", "minProperties": 10**6},
    "many properties": {"type": "object", "properties": {word: {"type": "integer"} for word in _words(20_000)}},
    "many required properties": {
        "type": "object",
        "properties": {word: {"type": "integer"} for word in _words(5_000)},
        "required": _words(5_000),
    },
    "union of thousands": _union(3_000),
    "alternatives that multiply": {"allOf": _STEPS},
    "patterns that multiply": {"allOf": _SEARCHES},
    "divisors that multiply": {"allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23, 29)]},
    "a large divisor": {"type": "integer", "multipleOf": 999_999_937},
    "a small divisor": {"type": "number", "multipleOf": 1e-300},
    "a huge range": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "an empty range": {"type": "integer", "minimum": 3, "maximum": 2},
    "nothing": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "pattern of nested stars": {"type": "string", "pattern": "^((a*)*)*b$"},
    "pattern of large repeats": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "pattern that looks back": {"type": "string", "pattern": "(a)\\1"},
    "property patterns that overlap": {
        "type": "object",
        "patternProperties": {f"{char}.*a": {"type": "integer"} for char in "abcdefghij"},
    },
    "a keyword that is not supported": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "keywords of an old draft": {"type": "integer", "exclusiveMinimum": True, "minimum": 1},
    "no schema": {"type": 5},
}
EXPRESSIONS: dict[str, str] = {
    "nested plus": "(a+)+b",
    "nested star": "((a*)*)*$",
    "alternatives that are alike": "(a|a|aa)*b",
    "a billion": "a{1000000000}",
    "powers of a hundred": "((((a{100}){100}){100}){100})",
    "states that double": "[ab]*a[ab]{400}",
    "gaps": "(.*a.{1000}){1000}",
    "parentheses": "(" * 5_000 + "a" + ")" * 5_000,
    "alternatives by thousands": "|".join(_words(30_000)),
    "lengths": "|".join("x" * i for i in range(1, 1_400)),
    "all of Unicode": "(\\p{L}|\\p{N}|\\p{S}){1,5000}",
    "folded": "(?i)(" + "|".join(_words(2_000)) + "){100}",
    "looks ahead": "(?=a)b",
    "no expression": "a{2,1}(",
}
GRAMMARS: dict[str, str] = {
    "ambiguous": 'start: s\ns: s s | "a" |\n',
    "ambiguous words": "start: s\ns: s s s | s s | W\nW: /[a-z]*/\n",
    "recursive on the left": 'start: start "a" | "b"\n',
    "recursive on the right": 'start: "a" start | "b"\n',
    "no sentence": "start: start\n",
    "no rule": "",
    "rules by thousands": "start: "
    + " | ".join(f"r{i}" for i in range(10_000))
    + "\n"
    + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 10_000}' for i in range(10_000)),
    "texts by thousands": "start: " + "|".join(f'"{word}"' for word in _words(40_000)),
    "repeats": 'start: ("a" | "b" start){0,100000}\n',
    "nested repeats": "start: " + "(" * 30 + '"a"' + "){2,50}" * 30 + "\n",
    "complement": "start: X\nX: /.*/ & ~(/.*a.*/) & /.*b.{30}/\n",
    "intersections": "start: X\nX: " + " & ".join(f"/.*{char}.*/" for char in "abcdefghijklmnopq") + "\n",
    "deep parentheses": "start: " + "(" * 3_000 + '"a"' + ")" * 3_000 + "\n",
    "GBNF of parentheses": "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000,
    "GBNF of 1 MB": "\n".join(f'r{i} ::= "x{i}" [a-z]+' for i in range(35_000)),
    "a schema within": 'start: "<" %json {"$ref": "#"} ">"\n',
    "no grammar": 'start: ("a"\n',
}
HOSTILE: dict[str, dict[str, Any]] = {
    **{f"schema: {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    **{f"expression: {name}": {"regex": text} for name, text in EXPRESSIONS.items()},
    **{f"grammar: {name}": {"grammar": text} for name, text in GRAMMARS.items() if text},
    "choice: thousands": {"choice": _words(40_000)},
}
