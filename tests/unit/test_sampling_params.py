"""Every field of SamplingParams at, inside and outside its limits, and with hostile values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from transfuse.errors import RequestError, SamplingParamsError
from transfuse.sampling_params import SamplingParams

HUGE = 10**400
# Longer than Python is willing to print.
UNPRINTABLE = 10**5000
NAN, INF = float("nan"), float("inf")
HOSTILE = [NAN, INF, -INF, True, False, "1", b"1", [1], {}, HUGE, -HUGE, UNPRINTABLE, 1j, object()]

# Field: the rest of the request, accepted values, refused values.
INTEGERS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "n": ({}, [1, 128], [0, -1, 129, 2**31, 2**63, 1.0]),
    "top_k": ({}, [-1, 0, 1, 2**31 - 1], [-2, 2**31, 2**63, 5.0]),
    "seed": ({}, [None, 0, 2**31, 2**63 - 1], [-1, 2**63, 0.0]),
    "max_tokens": ({}, [None, 1, 2**31 - 1], [0, -1, 2**31, 2**63, 2.0]),
    "min_tokens": ({"max_tokens": None}, [0, 1, 2**31 - 1], [-1, 2**31, 2**63, 0.0]),
    "logprobs": ({}, [None, 0, 20], [-1, 21, 2**31, 2**63, 1.0]),
    "prompt_logprobs": ({}, [None, 0, 20], [-1, 21, 2**31, 2**63, 1.0]),
}
NUMBERS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "temperature": ({}, [0, 0.0, 1, 1e-30, 1e30, 2**31, 2**63], [-1, -1e-30, 1.1e30]),
    "top_p": ({}, [1e-9, 1, 1.0], [0, 0.0, -1, 1.0000001, 2**31, 2**63]),
    "min_p": ({}, [0, 0.0, 1, 1.0], [-1, -1e-9, 1.0000001, 2**31, 2**63]),
    "repetition_penalty": ({}, [1e-9, 1, 1e30, 2**31, 2**63], [0, 0.0, -1, 1.1e30]),
    "presence_penalty": ({}, [-2, 0, -1, 2.0], [-2.01, 2.01, 2**31, 2**63]),
    "frequency_penalty": ({}, [-2, 0, -1, 2.0], [-2.01, 2.01, 2**31, 2**63]),
}
FLAGS = ["include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"]
FIELDS = INTEGERS | NUMBERS


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (_, good, _) in FIELDS.items() for v in good], ids=str)
def test_values_in_range_are_taken_as_they_are(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{**FIELDS[field][0], field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, (_, _, bad) in FIELDS.items() for v in [*bad, *HOSTILE]],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=rf"SamplingParams\.{field} is .*; expected ") as caught:
        SamplingParams(**{**FIELDS[field][0], field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 300
    assert isinstance(caught.value, RequestError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("field", [f for f, (_, good, _) in FIELDS.items() if None not in good])
def test_fields_that_have_a_number_always_do_not_take_none(field: str) -> None:
    with pytest.raises(SamplingParamsError):
        SamplingParams(**{field: None})


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "true", HUGE, UNPRINTABLE, NAN], ids=lambda v: type(v).__name__)
def test_flags_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=field):
        SamplingParams(**{field: value})
    assert getattr(SamplingParams(**{field: True}), field) is True
    assert getattr(SamplingParams(**{field: False}), field) is False


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(SamplingParamsError, match=r"min_tokens is 6; expected at most max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, ()),
        ("\n", ("\n",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
        (["x"] * 16, ("x",) * 16),
        ("y" * 1024, ("y" * 1024,)),
    ],
    ids=lambda value: str(value)[:10],
)
def test_stop_strings_become_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    params = SamplingParams(stop=given)
    assert params.stop == kept
    assert params.stop_strings == kept


BAD_STRINGS = ["", [""], ["a", 1], [None], 1, True, b"ab", [b"a"], {"a"}, {"a": 1}, "y" * 1025, "\ud800", [HUGE], HUGE]


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize(
    "value", [*BAD_STRINGS, [UNPRINTABLE], {UNPRINTABLE: 1}, range(2**70)], ids=lambda v: str(type(v))
)
def test_texts_are_lists_of_strings(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=field) as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("field", "most"), [("stop", 16), ("bad_words", 1024), ("stop_token_ids", 1024)])
def test_lists_are_bounded(field: str, most: int) -> None:
    entry: Any = 7 if field == "stop_token_ids" else "a"
    assert len(getattr(SamplingParams(**{field: [entry] * most}), field)) == most
    with pytest.raises(SamplingParamsError, match=f"at most {most}"):
        SamplingParams(**{field: [entry] * (most + 1)})


def test_bad_words_must_be_a_list() -> None:
    with pytest.raises(SamplingParamsError, match="bad_words"):
        SamplingParams(bad_words="word")


def test_stop_strings_need_text() -> None:
    with pytest.raises(SamplingParamsError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop == ()


@pytest.mark.parametrize(
    "token", [-1, 2**31, 2**63, HUGE, UNPRINTABLE, NAN, 1.0, True, "1", None], ids=lambda v: str(type(v))
)
def test_token_ids_are_checked_one_by_one(token: Any) -> None:
    with pytest.raises(SamplingParamsError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[0, token])
    with pytest.raises(SamplingParamsError, match="logit_bias"):
        SamplingParams(logit_bias={token: 1.0})


def test_token_ids_in_range() -> None:
    assert SamplingParams(stop_token_ids=[0, 2**31 - 1]).stop_token_ids == (0, 2**31 - 1)
    assert SamplingParams(logit_bias={0: -100, 2**31 - 1: 100.0}).logit_bias == {0: -100.0, 2**31 - 1: 100.0}
    assert SamplingParams().logit_bias == {}
    assert SamplingParams(logit_bias={i: 0.5 for i in range(1024)}).logit_bias == dict.fromkeys(range(1024), 0.5)


@pytest.mark.parametrize(
    "value", [-100.1, 101, HUGE, UNPRINTABLE, NAN, INF, True, "1", None], ids=lambda v: str(type(v))
)
def test_biases_are_checked_one_by_one(value: Any) -> None:
    with pytest.raises(SamplingParamsError, match="logit_bias"):
        SamplingParams(logit_bias={1: value})


@pytest.mark.parametrize(
    "value", [[1], "1", 5, dict.fromkeys(range(1025), 1.0), b"1", "12", range(3)], ids=lambda v: str(type(v))
)
def test_collections_of_the_wrong_kind(value: Any) -> None:
    with pytest.raises(SamplingParamsError):
        SamplingParams(logit_bias=value)
    if not isinstance(value, list):
        with pytest.raises(SamplingParamsError):
            SamplingParams(stop_token_ids=value)


def test_what_was_given_is_copied() -> None:
    bias, stop = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2], stop[0] = 2.0, "b"
    assert params.logit_bias == {1: 1.0}
    assert params.stop == ("a",)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (-0.0, True), (1e-9, False), (1.0, False)])
def test_only_temperature_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_no_heavy_import() -> None:
    code = "import sys, transfuse.sampling_params; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
