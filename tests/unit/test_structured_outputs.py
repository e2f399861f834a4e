"""What an answer must be is checked before any work is done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from transfuse.errors import SamplingParamsError
from transfuse.sampling_params import SamplingParams
from transfuse.structured_outputs import KINDS, MAX_CHOICES, MAX_GRAMMAR_CHARS, StructuredOutputsParams

GOOD: dict[str, Any] = {
    "json": '{"type": "object"}',
    "regex": "[a-z]+",
    "choice": ("a", "b"),
    "grammar": 'root ::= "a"',
    "json_object": True,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_known_by_its_name_and_survives_as_plain_data(kind: str) -> None:
    params = StructuredOutputsParams(**{kind: GOOD[kind]})
    assert params.kind == kind
    assert getattr(params, kind) == GOOD[kind]
    assert StructuredOutputsParams(**json.loads(json.dumps(params.as_mapping()))) == params


def test_a_schema_given_as_an_object_is_kept_as_text() -> None:
    schema = {"type": "string", "enum": ["ä", "\n"]}
    params = StructuredOutputsParams(json=schema)
    assert isinstance(params.json, str) and json.loads(params.json) == schema


def test_choices_are_kept_once_and_in_order() -> None:
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json_object": False},
        {"json": "{}", "regex": "a"},
        {"json_object": True, "choice": ["a"]},
        {"json": 5},
        {"json": {"a": {1}}},
        {"json": {"a": float("nan")}},
        {"json": ""},
        {"regex": b"a"},
        {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
        {"grammar": "\ud800"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", 5]},
        {"choice": ["a", None]},
        {"choice": ["a", ""]},
        {"choice": ["a"] * (MAX_CHOICES + 1)},
        {"choice": ["a" * 1000] * 1100},
        {"json_object": "yes"},
        {"json": "{}", "disable_any_whitespace": 1},
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name_and_briefly(given: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match=r"SamplingParams\.structured_outputs.* expected ") as caught:
        StructuredOutputsParams(**given)
    assert len(str(caught.value)) < 300


def test_sampling_takes_nothing_but_such_an_object() -> None:
    params = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    with pytest.raises(SamplingParamsError, match=r"structured_outputs is .* expected a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
