"""Grammars over tokens of every kind of tokenizer, and what is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from transfuse.errors import StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.grammar import MAX_GBNF_CHARS, compile_grammar, make_vocabulary

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SPECIALS = ["<unk>", "<s>", "</s>"]
END = 2


def byte_level() -> Tokenizer:
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "ab", "Ċ"]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def sentencepiece_bpe() -> Tokenizer:
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", *LETTERS, "ab", *'{}":,[]']
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def unigram() -> Tokenizer:
    pieces = [*SPECIALS, "▁", "▁a", *LETTERS, "ab", "1", "0", *'{}":,[].-"\\']
    made = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def plain() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *LETTERS, " ", "ab", "0", "1", *'{}":,[]'])}
    return Tokenizer(models.BPE(vocab=vocab, merges=[]))


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece_bpe, "unigram": unigram, "plain": plain}


def spec(made: Tokenizer) -> TokenizerSpec:
    made.add_special_tokens(SPECIALS)
    return TokenizerSpec(backend=made.to_str(), eos_token_ids=(END,))


def sentence(params: StructuredOutputsParams, made: Tokenizer, seed: int = 0) -> str:
    """A sentence of the grammar, of tokens drawn at random, by the tokens' own bytes."""
    vocabulary = make_vocabulary(spec(made), made.get_vocab_size() + 5)
    matcher, source = compile_grammar(vocabulary, params).start(), random.Random(seed)
    tokens: list[int] = []
    for _ in range(200):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = source.choice(bits.nonzero()[0].tolist())
        assert token < made.get_vocab_size(), "there is no such token"
        assert matcher.consume_token(token)
        if token == END:
            break
        tokens.append(token)
        if matcher.is_stopped():
            break
    return str(bytes(vocabulary.decode_bytes(tokens)), "utf-8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_sentences_are_of_the_grammar_whatever_the_tokens_look_like(kind: str, seed: int) -> None:
    pattern = "[ab]{1,6} a[a-z]{2}"
    assert re.fullmatch(pattern, sentence(StructuredOutputsParams(regex=pattern), KINDS[kind](), seed))
    asked = StructuredOutputsParams(json={"enum": [["ab", 10], {"a b": ""}]}, disable_any_whitespace=True)
    assert json.loads(sentence(asked, KINDS[kind](), seed)) in (["ab", 10], {"a b": ""})


def test_white_space_in_json_is_bounded_and_can_be_left_out() -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    texts = [sentence(StructuredOutputsParams(json=schema), byte_level(), seed) for seed in range(20)]
    assert all(json.loads(text) == [1, 1] for text in texts)
    assert len(set(texts)) > 1 and max(len(gap) for text in texts for gap in re.findall(r"\s+", text)) <= 40
    assert sentence(StructuredOutputsParams(json=schema, disable_any_whitespace=True), byte_level()) == "[1,1]"


@pytest.mark.parametrize("text", ['a"b\\n', "x/y", "日本\x00\x7f\u2028", "%json {}", "\\d+\t", "::= a"])
def test_choices_are_taken_as_they_are(text: str) -> None:
    assert sentence(StructuredOutputsParams(choice=[text]), byte_level()) == text


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "<" word ">"\nword ::= [a-b]{2,3}', 'start: "<" WORD ">"\nWORD: /[a-b]{2,3}/'],
    ids=["GBNF", "Lark"],
)
def test_both_languages_of_grammars_are_read(grammar: str) -> None:
    assert re.fullmatch("<[ab]{2,3}>", sentence(StructuredOutputsParams(grammar=grammar), byte_level()))


def test_lark_names_special_tokens_and_holds_schemas() -> None:
    asked = StructuredOutputsParams(grammar='start: <s> %json {"const": 1} <unk>')
    vocabulary = make_vocabulary(spec(byte_level()), 0)
    matcher = compile_grammar(vocabulary, asked).start()
    assert matcher.try_consume_tokens([1, *vocabulary.tokenize_str("1"), 0]) == 3
    assert matcher.is_accepting()


def test_masks_have_bits_for_all_tokens_and_for_all_logits() -> None:
    made = spec(byte_level())
    tokens = make_vocabulary(made, 0).vocab_size
    assert tokens == byte_level().get_vocab_size()
    assert make_vocabulary(made, 1000).vocab_size == 1000
    assert compile_grammar(make_vocabulary(made, 1000), StructuredOutputsParams(regex="a")).num_tokens == 1000


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(StructuredOutputsError, match="cannot be had with this model's tokenizer"):
        make_vocabulary(TokenizerSpec(backend=made.to_str()), 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "it is no JSON"),
    ({"json": "[" * 100_000}, "it is no JSON"),
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"properties": {"a": {"anyOf": [{"uniqueItems": True}]}}}}, r"not supported: \[.uniqueItems.\]"),
    (
        {"json": {"$defs": {"a": {"additionalItems": False}}, "$ref": "#/$defs/a"}},
        "'additionalItems' is of an old draft",
    ),
    ({"json": {"items": [{"type": "integer"}]}}, "use prefixItems"),
    ({"json": {"allOf": [{"exclusiveMaximum": True}]}}, "give the number"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "Unsatisfiable"),
    ({"json": {"$ref": "#"}}, "there is no text that it allows"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "|".join(f"{i} {i * 7919 % 10007}" for i in range(40_000))}, "too big"),
    ({"grammar": "start: other"}, "other"),
    ({"grammar": "start: start"}, "there is no text that it allows"),
    ({"grammar": "root ::= ("}, "it is no GBNF"),
    ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
    ({"grammar": 'root ::= "' + "a" * MAX_GBNF_CHARS + '"'}, f"GBNF may have {MAX_GBNF_CHARS}"),
    ({"choice": [f"{i} {i * 7919 % 10007}" for i in range(40_000)]}, "too big"),
]


@pytest.mark.parametrize(("asked", "match"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_had_is_refused_with_the_reason(asked: dict[str, Any], match: str) -> None:
    vocabulary = make_vocabulary(spec(byte_level()), 0)
    with pytest.raises(StructuredOutputsError, match=match) as caught:
        compile_grammar(vocabulary, StructuredOutputsParams(**asked))
    assert str(caught.value).startswith("The answer cannot be held to its ")
    assert len(str(caught.value)) < 500


# Every keyword of drafts 4 to 2020-12 that can make a value invalid, where it would.
ASSERTIONS: dict[str, dict[str, Any]] = {
    "type": {"type": "integer"},
    "enum": {"enum": [1]},
    "const": {"const": 1},
    "multipleOf": {"multipleOf": 2},
    "maximum": {"maximum": 1},
    "exclusiveMaximum": {"exclusiveMaximum": 1},
    "minimum": {"minimum": 1},
    "exclusiveMinimum": {"exclusiveMinimum": 1},
    "maxLength": {"maxLength": 1},
    "minLength": {"minLength": 1},
    "pattern": {"pattern": "a"},
    "format": {"format": "date"},
    "items": {"items": False},
    "prefixItems": {"prefixItems": [False]},
    "additionalItems": {"additionalItems": False},
    "maxItems": {"maxItems": 1},
    "minItems": {"minItems": 1},
    "uniqueItems": {"uniqueItems": True},
    "contains": {"contains": False},
    "minContains": {"contains": {}, "minContains": 2},
    "unevaluatedItems": {"unevaluatedItems": False},
    "maxProperties": {"maxProperties": 1},
    "minProperties": {"minProperties": 1},
    "required": {"required": ["a"]},
    "properties": {"properties": {"a": False}},
    "patternProperties": {"patternProperties": {"a": False}},
    "additionalProperties": {"additionalProperties": False},
    "propertyNames": {"propertyNames": {"maxLength": 1}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": False}},
    "allOf": {"allOf": [{"type": "integer"}]},
    "anyOf": {"anyOf": [{"type": "integer"}]},
    "oneOf": {"oneOf": [{"type": "integer"}]},
    "not": {"not": {"type": "integer"}},
    "if": {"if": {"type": "integer"}, "then": False},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "divisibleBy": {"divisibleBy": 2},
    "disallow": {"disallow": "integer"},
    "extends": {"extends": {"type": "integer"}},
}
VALUES = ['"2020-01-01"', '""', '"ba"', "0", "1", "3", "1.5", "null", "true", "[]", "[1,1]", "[1,2]"]
VALUES += ["{}", '{"a":1}', '{"bb":1,"c":2}']


@pytest.mark.parametrize("keyword", ASSERTIONS)
def test_no_keyword_is_passed_over_in_silence(keyword: str) -> None:
    from jsonschema import Draft202012Validator, FormatChecker

    schema = ASSERTIONS[keyword]
    vocabulary = make_vocabulary(spec(byte_level()), 0)
    try:
        grammar = compile_grammar(vocabulary, StructuredOutputsParams(json=schema))
    except StructuredOutputsError:
        return
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    for text in VALUES:
        matcher = grammar.start()
        tokens = vocabulary.tokenize_str(text)
        is_sentence = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert not is_sentence or validator.is_valid(json.loads(text)), (text, schema)
