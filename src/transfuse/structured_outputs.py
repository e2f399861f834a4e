"""What an answer must be: JSON of a schema, text of a regular expression or of a grammar, or one of some texts."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transfuse.errors import SamplingParamsError

MAX_GRAMMAR_CHARS = 1 << 20
MAX_CHOICES = 1 << 16
KINDS = ("json", "regex", "choice", "grammar", "json_object")
_NAMES = dict(zip(KINDS, ("JSON schema", "regular expression", "choice", "grammar", "JSON object"), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Constrains what is generated; exactly one of the first five is given. Names follow vLLM's offline API.

    Attributes:
        json: a JSON schema, as text or as an object; kept as text. The answer is one JSON value that it allows.
        regex: a regular expression that the whole answer matches.
        choice: texts, of which the answer is one.
        grammar: a grammar with a start rule `root` (GBNF, `root ::= ...`) or `start` (Lark, `start: ...`), of which
            the whole answer is a sentence. Lark may hold JSON schemas, as `%json {...}`, and special tokens, as
            `<|name|>`.
        json_object: True: any JSON object.
        disable_any_whitespace: for `json` and `json_object`: no white space outside strings.

    Raises:
        SamplingParamsError: none or several are given, or one is of the wrong type or too large.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for field in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, field), bool | None):
                raise _error(field, f"a {type(getattr(self, field)).__name__}", "True or False")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_text(self.json))
        for field in ("json", "regex", "grammar"):
            _check_text(field, getattr(self, field), MAX_GRAMMAR_CHARS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _check_choice(self.choice))
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise SamplingParamsError("structured_outputs", given, f"exactly one of {', '.join(KINDS)}")

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def name(self) -> str:
        """The kind in words."""
        return _NAMES[self.kind]

    def as_mapping(self) -> dict[str, Any]:
        """What is given, as plain data; `StructuredOutputsParams(**mapping)` is equal to this one."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def _as_text(schema: Mapping[str, Any]) -> str:
    try:
        return _json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error("json", f"an object that is no JSON ({error})", "a JSON schema") from error


def _check_choice(choice: object) -> tuple[str, ...]:
    expected = f"a list of 1 to {MAX_CHOICES} different texts"
    if not isinstance(choice, Sequence) or isinstance(choice, str | bytes | range):
        raise _error("choice", f"a {type(choice).__name__}", expected)
    if not 0 < len(choice) <= MAX_CHOICES:
        raise _error("choice", f"a list of {len(choice)}", expected)
    for text in choice:
        if text is None:
            raise _error("choice", None, expected)
        _check_text("choice", text, MAX_GRAMMAR_CHARS)
    if (total := sum(map(len, choice))) > MAX_GRAMMAR_CHARS:
        raise _error("choice", f"{total} characters in all", f"at most {MAX_GRAMMAR_CHARS} characters in all")
    return tuple(dict.fromkeys(choice))


def _check_text(field: str, text: object, most: int) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise _error(field, f"a {type(text).__name__}", "text")
    if not 0 < len(text) <= most:
        raise _error(field, f"a text of {len(text)} characters", f"1 to {most} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error(field, "no valid Unicode", "text without lone surrogates") from None


def _error(field: str, value: object, expected: str) -> SamplingParamsError:
    return SamplingParamsError(f"structured_outputs.{field}", value, expected)
