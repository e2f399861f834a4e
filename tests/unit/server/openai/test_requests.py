"""Bodies of requests: what is read, and what is refused before any work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from transfuse.errors import RequestError
from transfuse.server.bodies import MAX_MESSAGES
from transfuse.server.errors import FieldError
from transfuse.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from transfuse.structured_outputs import StructuredOutputsParams

USER = {"role": "user", "content": "hi"}
HUGE = 10**400
# Field: lowest, highest; numbers beyond 10**30 are none.
INTEGERS = {
    "n": (1, 128),
    "best_of": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "min_tokens": (0, 2**31 - 1),
    "prompt_logprobs": (0, 20),
    "max_tokens": (1, 2**31 - 1),
    "priority": (-(2**31) + 1, 2**31 - 1),
}
FLOATS = {
    "temperature": (0, 1e30),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
OPEN_FLOATS = {"top_p": (0, 1), "repetition_penalty": (0, 1e30)}
BOOLEANS = ["stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids"]


def read(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], **fields})


def place_of(fields: dict[str, Any], model: Any = ChatRequest, **base: Any) -> tuple[Any, ...]:
    """Where the first error is."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**(base or {"messages": [USER]}), **fields})
    return caught.value.errors()[0]["loc"]


@pytest.mark.parametrize("field", [*INTEGERS, "top_logprobs", "max_completion_tokens"])
@pytest.mark.parametrize("value", ["1", True, 1.0, 1.5, HUGE, -HUGE, 2**63, float("nan"), float("inf"), [1], {}])
def test_only_integers_are_integers(field: str, value: Any) -> None:
    assert place_of({field: value})[0] == field


@pytest.mark.parametrize("field", [*FLOATS, *OPEN_FLOATS])
@pytest.mark.parametrize("value", ["1", True, HUGE, float("nan"), float("inf"), -float("inf"), 1e31, [1], {}])
def test_only_finite_numbers_are_numbers(field: str, value: Any) -> None:
    assert place_of({field: value})[0] == field


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", ["true", 1, 0, [], "yes"])
def test_only_true_and_false_are_booleans(field: str, value: Any) -> None:
    assert place_of({field: value})[0] == field


@pytest.mark.parametrize(("field", "limits"), (INTEGERS | FLOATS).items())
def test_limits_are_in_and_what_is_beyond_is_out(field: str, limits: tuple[float, float]) -> None:
    low, high = limits
    for value in limits:
        assert getattr(read(**{field: value}), field) == value
    assert place_of({field: low - 1})[0] == field
    assert place_of({field: high * 2 + 1})[0] == field


@pytest.mark.parametrize(("field", "limits"), OPEN_FLOATS.items())
def test_zero_is_out_where_it_means_nothing(field: str, limits: tuple[float, float]) -> None:
    assert place_of({field: 0})[0] == field
    assert getattr(read(**{field: limits[1]}), field) == limits[1]


def test_the_models_limits_are_those_of_the_engine() -> None:
    # What passes here has to pass there, or be refused there with a message of its own.
    extremes = {name: limits[1] for name, limits in (INTEGERS | FLOATS | OPEN_FLOATS).items() if name != "best_of"}
    read(**extremes).to_sampling({})
    extremes = {name: limits[0] for name, limits in (INTEGERS | FLOATS).items()}
    read(**extremes).to_sampling({})


@pytest.mark.parametrize("field", [*INTEGERS, *FLOATS, *OPEN_FLOATS, *BOOLEANS, "stop", "logit_bias", "user", "model"])
def test_null_is_as_good_as_nothing(field: str) -> None:
    assert read(**{field: None}).to_sampling({}) == read().to_sampling({})


@pytest.mark.parametrize("name", ["nope", "Temperature", "guided_regexp", "best_off", "", "x" * 1000])
def test_unknown_fields_are_named(name: str) -> None:
    assert place_of({name: 1}) == (name,)


def test_an_object_of_endless_fields_is_no_endless_error() -> None:
    with pytest.raises(ValidationError) as caught:
        read(**{f"f{i}": 1 for i in range(100_000)})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("stop", [["a"] * 17, [""], "", [1], "x" * 1025, ["ok", None], {"a": 1}, [["a"]]])
def test_stops_are_few_and_short_texts(stop: Any) -> None:
    assert place_of({"stop": stop})[0] == "stop"


@pytest.mark.parametrize("stop", ["a", ["a"], ["a"] * 16, [], "x" * 1024])
def test_one_stop_or_several(stop: Any) -> None:
    assert read(stop=stop).to_sampling({}).params.stop_strings == tuple([stop] if isinstance(stop, str) else stop)


@pytest.mark.parametrize(
    "bias",
    [
        *({"a": 1}, {"1": 101}, {"1": "1"}, {"1": True}, {"-1": 1}, {"1.0": 1}, {"٣": 1}, {"": 1}, {str(2**31): 1}),
        *({"1" * 5000: 1}, {str(i): 1 for i in range(1025)}, [1], "x", {"1": float("nan")}, {"1": None}),
    ],
)
def test_biases_are_numbers_by_token_id(bias: Any) -> None:
    assert place_of({"logit_bias": bias})[0] == "logit_bias"


@pytest.mark.parametrize(
    "prompt",
    [
        *([], None, 5, True, {}, [1, "a"], [True], [1.0], [-1], [2**31], [[1], []], [[]], ["a", None], [[1], [HUGE]]),
        *(["a"] * 257, [[[1]]], ["a", [1], 3]),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any) -> None:
    assert place_of({"prompt": prompt}, CompletionRequest, prompt="x") == ("prompt",)


@pytest.mark.parametrize("tokens", [[-1], ["1"], [True], [1.5], [2**31], "x", None, [[1]]])
def test_tokens_are_ids(tokens: Any) -> None:
    assert place_of({"tokens": tokens}, DetokenizeRequest, tokens=[])[0] == "tokens"


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "nobody", "content": "x"}, "role"),
        ({"role": 5, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": {"text": "x"}}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": ["x"]}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}] * 2049}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "content"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}, "tool_calls"),
    ],
)
def test_messages_are_checked_and_the_place_is_named(message: dict[str, Any], place: str) -> None:
    assert place_of({"messages": [USER, message]})[:3] == ("messages", 1, place)


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_only_assistants_and_tools_may_say_nothing(role: str) -> None:
    assert place_of({"messages": [{"role": role, "content": None}]}) == ("messages", 0)
    read(messages=[{"role": "assistant", "content": None}, {"role": "tool", "content": None}])


@pytest.mark.parametrize("messages", [[], [USER] * (MAX_MESSAGES + 1), None, "x", {}, ["x"], [None]])
def test_conversations_are_lists_of_messages(messages: Any) -> None:
    assert place_of({"messages": messages})[0] == "messages"


def test_as_many_messages_as_allowed() -> None:
    assert len(read(messages=[USER] * MAX_MESSAGES).messages) == MAX_MESSAGES


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"tools": []},
        {"chat_template": "x"},
        {"add_generation_prompt": False},
        {"documents": []},
        {"_private": 1},
        {"not a name": 1},
        {"x": "y" * 20_000},
        {"x": [[[[[[[[1]]]]]]]]},
        {f"x{i}": 1 for i in range(65)},
        [1],
        "x",
    ],
)
def test_template_variables_are_few_small_and_no_others_fields(kwargs: Any) -> None:
    assert place_of({"chat_template_kwargs": kwargs}) == ("chat_template_kwargs",)


def test_template_variables_that_are_fine() -> None:
    kwargs = {"enable_thinking": False, "x": [[[[[[[1]]]]]]], "größe": None}
    assert read(chat_template_kwargs=kwargs).chat_template_kwargs == kwargs


def test_limits_of_a_request_are_products() -> None:
    body = CompletionRequest.model_validate({"prompt": ["x"] * 8, "n": 128})
    body.to_sampling({})
    with pytest.raises(RequestError, match="9 prompts times n=128"):
        CompletionRequest.model_validate({"prompt": ["x"] * 9, "n": 128}).to_sampling({})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, {"json_object": True}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, None),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
    ],
    ids=str,
)
def test_what_the_answer_must_be_is_read_from_every_name(body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = read(**body).to_sampling({}).params.structured_outputs
    if body.get("structured_outputs", {}).get("disable_any_whitespace"):
        expected = {"json": SCHEMA, "disable_any_whitespace": True}
    assert found == (None if expected is None else StructuredOutputsParams(**expected))


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_choice": ["x" * 2**20, "y"]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_what_the_answer_must_be_is_said_once_and_within_bounds(body: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as caught:
        read(**body).to_sampling({})
    assert caught.value.field == next(iter(body))
    assert len(str(caught.value)) < 300
