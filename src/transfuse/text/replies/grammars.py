"""Grammars for whole replies: reasoning first, then calls in the family's own form, or what else is asked for.

They are in Lark as llguidance reads it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): special
tokens are no text there, and stand by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transfuse.errors import StructuredOutputsError
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.replies.syntax import CallFrame, CallSyntax

# As templates write JSON. With any white space allowed, a model may write nothing else.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a reply must be.

    Attributes:
        tools: by name, the schemas of the arguments that calls are held to.
        must_call: whether it has to call one of them.
        is_parallel: whether it may call several.
        body: what it is instead of free text, as a term of a grammar; None for free text.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    must_call: bool = False
    is_parallel: bool = True
    body: str | None = None


def json_body(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as a term of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _COMPACT}, ensure_ascii=False)}"


def structure_term(structure: StructuredOutputsParams) -> str:
    """What an answer must be, as a term of a grammar.

    Raises:
        StructuredOutputsError: it is a grammar itself, which cannot be part of another.
    """
    match structure.kind:
        case "json":
            return _json_term(structure)
        case "json_object":
            return json_body({"type": "object"})
        case "regex":
            # A slash ends an expression in Lark, and so does the end of a line.
            pattern = re.sub(r"\\.|/", lambda part: r"\/" if part[0] == "/" else part[0], str(structure.regex))
            return "/" + pattern.replace("\n", r"\n") + "/"
        case "choice":
            return f"({' | '.join(map(_literal, structure.choice or ()))})"
    raise StructuredOutputsError(
        "structured_outputs.grammar holds for a whole reply, so it goes neither with tools nor with a model that "
        "thinks first. Use json, regex or choice; or start the server with --reasoning-parser none."
    )


def _json_term(structure: StructuredOutputsParams) -> str:
    try:
        schema = json.loads(str(structure.json))
    except (ValueError, RecursionError) as error:
        raise StructuredOutputsError(f"structured_outputs.json is no JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise StructuredOutputsError("structured_outputs.json is no object; send a JSON schema.")
    free = {"whitespace_flexible": not structure.disable_any_whitespace}
    return f"%json {json.dumps({**schema, 'x-guidance': free}, ensure_ascii=False)}"


class ReplyGrammar:
    """Writes the grammar of one reply.

    Args:
        special: ids of the special tokens, by their text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._markers = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []

    def terms(self, text: str) -> str:
        """A text as terms of a grammar; white space alone where it is empty."""
        parts: list[str] = []
        position = 0
        for match in self._markers.finditer(text):
            parts += [text[position : match.start()], f"<[{self._special[match[0]]}]>"]
            position = match.end()
        parts.append(text[position:])
        return " ".join(part if part.startswith("<[") else _literal(part) for part in parts if part)

    def add(self, rule: str) -> None:
        """Another rule."""
        if rule not in self._rules:
            self._rules.append(rule)

    def until(self, name: str, marker: str) -> str:
        """A rule for any text up to a marker and with it; its name."""
        self.add(_TEXT)
        if marker in self._special:
            self.add(f"{name}: TEXT {self.terms(marker)}")
        else:
            self.add(f"{name}[lazy]: TEXT {_literal(marker)}")
        return name

    def calls(self, frame: CallFrame, demand: Demand, cut: int = 0) -> str:
        """A rule for one call, or several in a row; its name.

        Args:
            frame: how calls are written.
            demand: what may be called, and whether there may be several.
            cut: characters at the start that have been written.
        """
        first, cut_of_call = (frame.first[cut:], 0) if frame.first else ("", cut)
        names = []
        for index, (name, schema) in enumerate(demand.tools.items()):
            before = self.terms(frame.before(name)[cut_of_call:])
            self.add(f"call_{index}: {before} arguments_{index} {self.terms(frame.after)}")
            self.add(f"arguments_{index}: {json_body(schema)}")
            names.append(f"call_{index}")
        self.add(f"call: {' | '.join(names)}")
        more = ""
        if demand.is_parallel and frame.between is not None and not cut_of_call:
            more = f"({self.terms(frame.between)} call)*"
        self.add(f"calls: {self.terms(first)} call {more} {self.terms(frame.last)}")
        return "calls"

    def replies(self, syntax: CallSyntax, demand: Demand) -> str:
        """A rule for what follows the reasoning; its name."""
        frame = syntax.frame
        assert frame is not None, "only a family whose calls can be held to is asked"
        if demand.must_call:
            return self.calls(frame, demand)
        if demand.body is not None:
            calls = self.calls(frame, demand)
            self.add(f"replies: {calls} | {demand.body}")
            return "replies"
        self.add(_TEXT)
        opener = syntax.frame_opener
        if opener:
            calls = self.calls(frame, demand, len(opener))
            self.add(f"row: {self.until('until_calls', opener)} {calls}")
            self.add(f"replies: row{'*' if demand.is_parallel else '?'} TEXT")
        else:
            calls = self.calls(frame, demand)
            self.add(f"NO_CALL: /\\s*([^\\s{re.escape(syntax.bare)}](?s:.*))?/")
            self.add(f"replies: {calls} | NO_CALL")
        return "replies"

    def text(self, *start: str) -> str:
        """The grammar.

        Args:
            *start: the terms that it is a row of.
        """
        return "\n".join([f"start: {' '.join(filter(None, start))}", *self._rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
