"""Compiles what an answer must be into a grammar over a model's tokens, within limits of size and work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from transfuse.errors import StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams

# The translation of GBNF is Python, and takes 3 s for a million characters.
MAX_GBNF_CHARS = 1 << 17
_MAX_REASON = 300
# Enough for what is indented deeply. Without a bound, a model that has lost its way fills its answer with spaces.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# The library's defaults but for two: a tenth of the fuel for expressions, which holds large schemas and bounds the time
# of a mask to some 0.1 s instead of 1 s; and a fifth of the states, which bounds a grammar's memory to some 100 MiB.
LIMITS = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)

# Keywords whose subschemas are a mapping, a list, or one schema; and assertions of old drafts that the library passes
# over as if they were notes.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()
_OLD = {
    "additionalItems": "items after prefixItems",
    "divisibleBy": "multipleOf",
    "disallow": "a schema of what is allowed",
    "extends": "allOf",
}


class Grammar:
    """A compiled grammar, shared by all requests that ask for it.

    Attributes:
        num_tokens: that its masks have a bit for; the same for all grammars of a model.

    Args:
        matcher: at its start; it never moves.
        num_tokens: see above.
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self.num_tokens = num_tokens

    def start(self) -> LLMatcher:
        """A matcher at the start of a text, the caller's own."""
        return self._matcher.deep_copy()


def make_vocabulary(tokenizer: TokenizerSpec, vocab_size: int) -> LLTokenizer:
    """The tokens of a model as bytes, arranged for masks; takes up to a second, and holds the interpreter's lock.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits, to which masks are made where the tokenizer has fewer tokens.

    Raises:
        StructuredOutputsError: this kind of tokenizer is not known.
    """
    data = json.loads(tokenizer.backend)
    known = data["model"]["vocab"]
    # Unigram lists its tokens; the other kinds map them to ids.
    ids = range(len(known)) if isinstance(known, list) else known.values()
    num_tokens = 1 + max((*ids, *(token["id"] for token in data["added_tokens"]), vocab_size - 1))
    ends = [token for token in tokenizer.eos_token_ids if token < num_tokens]
    data["decoder"] = _known_decoder(data["decoder"])
    try:
        return LLTokenizer(json.dumps(data), n_vocab=num_tokens, eos_token=ends or None)
    except ValueError as error:
        raise StructuredOutputsError(
            f"Structured outputs cannot be had with this model's tokenizer: {error}."
        ) from error


def _known_decoder(decoder: dict[str, Any] | None) -> dict[str, Any]:
    """A decoder that gives single tokens the same bytes, of the kinds that the library reads."""
    if decoder is not None and decoder["type"] != "Metaspace":
        return decoder
    parts: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if decoder is not None:
        parts.insert(0, {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "})
    return {"type": "Sequence", "decoders": parts}


def compile_grammar(vocabulary: LLTokenizer, params: StructuredOutputsParams) -> Grammar:
    """The grammar of what is asked for.

    Raises:
        StructuredOutputsError: it is no schema, expression or grammar, holds what is not supported, allows no text at
            all, or exceeds a limit.
    """
    matcher = LLMatcher(vocabulary, _grammar_text(params), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refusal(params, matcher)
    grammar = Grammar(matcher, vocabulary.vocab_size)
    # What is too large, or allows nothing, often shows with the first token only.
    first = grammar.start()
    first.compute_bitmask()
    if first.is_error():
        raise refusal(params, first)
    return grammar


def refusal(params: StructuredOutputsParams, matcher: LLMatcher) -> StructuredOutputsError:
    """What is wrong, of a matcher that is in error."""
    first, *others = matcher.get_error().removesuffix("<non-verbose/>").strip().splitlines()
    # Of an expression that cannot be read, the first line quotes it, and a later one says why.
    reason = " ".join([first, *(line.strip() for line in others if line.startswith("error:"))])
    if matcher.stop_reason() == "NoExtensionBias" or reason == "NoExtensionBias":
        reason = "there is no text that it allows"
    return _refused(params, reason)


def _refused(params: StructuredOutputsParams, reason: str) -> StructuredOutputsError:
    reason = reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "..."
    reason = reason.replace("Unimplemented keys", "keywords that are not supported").rstrip(".")
    return StructuredOutputsError(f"The answer cannot be held to its {params.name}: {reason}. Change or simplify it.")


def _grammar_text(params: StructuredOutputsParams) -> str:
    """What is asked for, in the language of llguidance."""
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, params.choice))
    if params.grammar is not None:
        text = _lark(params)
        _check_embedded(params, text)
        return text
    if params.json is not None:
        assert isinstance(params.json, str), "it is kept as text"
        _check_keywords(params, _read_schema(params))
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": not params.disable_any_whitespace,
                "whitespace_pattern": None if params.disable_any_whitespace else _WHITESPACE,
            },
        )
    except ValueError as error:
        raise _refused(params, str(error)) from error


def _lark(params: StructuredOutputsParams) -> str:
    text = params.grammar or ""
    if re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is None:
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise _refused(params, f"it has {len(text)} characters, and GBNF may have {MAX_GBNF_CHARS}; Lark may have more")
    try:
        return str(any_to_lark(text))
    except RecursionError as error:
        raise _refused(params, "it is nested too deeply") from error
    except Exception as error:  # The translator raises whatever its parts do.
        raise _refused(params, f"it is no GBNF: {error}") from error


def _read_schema(params: StructuredOutputsParams) -> Any:
    try:
        return json.loads(str(params.json))
    except (ValueError, RecursionError) as error:
        raise _refused(params, f"it is no JSON: {error}") from error


def _check_embedded(params: StructuredOutputsParams, lark: str) -> None:
    """The schemas within a grammar, as `_check_keywords` does; what is no JSON is the library's to refuse."""
    for match in _EMBEDDED.finditer(lark):
        try:
            schema, _ = _DECODER.raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            continue
        _check_keywords(params, schema)


def _check_keywords(params: StructuredOutputsParams, schema: Any) -> None:
    """Refuses what the library would pass over in silence."""
    for part in _subschemas(schema):
        for keyword in part.keys() & _OLD.keys():
            raise _refused(params, f"the keyword {keyword!r} is of an old draft; use {_OLD[keyword]}")
        if isinstance(part.get("items"), list):
            raise _refused(params, "'items' is a list, as in old drafts; use prefixItems")
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(part.get(keyword), bool):
                raise _refused(params, f"{keyword!r} is true or false, as in an old draft; give the number")


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The objects in `schema` that are schemas, itself among them, without recursion."""
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        yield part
        left += [one for key in _MAPS if isinstance(part.get(key), dict) for one in part[key].values()]
        left += [one for key in _LISTS if isinstance(part.get(key), list) for one in part[key]]
        left += [part[key] for key in _SINGLE if key in part]
