"""What each API says of how a request was served, and where its types have room for that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.sdk_types import checked
from tests.unit.server.anthropic.conftest import named_events
from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import EOS, MAX_LEN, FakeLLM, byte_tokenizer, events_of
from tests.unit.server.spoken import HERMES
from transfuse.messages import NewRequest

HI = [{"role": "user", "content": "hi"}]
PATHS: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "/v1/chat/completions": ({"messages": HI}, "max_completion_tokens", ChatCompletion, ChatCompletionChunk),
    # Of a completion's chunks the client's type says wrongly that each has a finish reason.
    "/v1/completions": ({"prompt": "hi"}, "max_tokens", Completion, dict),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens", Response, ResponseStreamEvent),
    "/v1/messages": ({"model": "fake", "messages": HI}, "max_tokens", Message, RawMessageStreamEvent),
}


@pytest.fixture
def api() -> Api:
    return Api()


def hold(kind: Any, data: dict[str, Any]) -> None:
    """Against the client's type: with no field beside its own, but for those of choices that vLLM has too."""
    for choice in data.get("choices", ()):
        choice.pop("stop_reason", None)
    checked(kind, data)


def explained(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The one explanation of an answer, taken out of it."""
    if path != "/v1/completions":
        found: dict[str, Any] = answer.pop("explanation")
        return found
    (found,) = answer.pop("explanations")
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by", ["body", "header"])
def test_an_answer_says_how_it_was_served(api: Api, path: str, by: str) -> None:
    body, most, kind, _ = PATHS[path]
    api.settings["default_sampling"] = {"temperature": 0.5, "top_p": 0.25}
    asked = {**body, most: 4, "top_p": 0.75, **({"explain": True} if by == "body" else {})}
    response = api.request("POST", path, json=asked, headers={"x-explain": "1"} if by == "header" else {})
    answer = response.json()
    found = explained(path, answer)
    hold(kind, answer)
    sampling = found["sampling"]
    assert sampling["temperature"] == {"value": 0.5, "source": "generation_config"}
    assert sampling["top_p"] == {"value": 0.75, "source": "request"}
    assert sampling["max_tokens"] == {"value": 4, "source": "request"}
    assert sampling["top_k"] == {"value": 0, "source": "default"}
    assert found["implementation"] == {
        "name": "plain",
        "reason": "because",
        "dtype": "float32",
        "kernels": "portable",
    }
    assert (found["num_cached_tokens"], found["num_output_tokens"]) == (1, 4)
    assert found["total_seconds"] >= found["queue_seconds"] == 0 < found["prepare_seconds"] < 30
    assert found["truncation"] is None and found["grammar"] is None


@pytest.mark.parametrize("path", PATHS)
def test_nobody_is_told_unasked(api: Api, path: str) -> None:
    body, most, kind, _ = PATHS[path]
    hold(kind, api.post(path, {**body, most: 4}).json())
    said_no = api.request("POST", path, json={**body, most: 4, "explain": False}, headers={"x-explain": "true"})
    hold(kind, said_no.json())


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_it_at_its_end(api: Api, path: str) -> None:
    body, most, _, kind = PATHS[path]
    text = api.post(path, {**body, most: 4, "explain": True, "stream": True}).text
    events = named_events(text) if path in ("/v1/responses", "/v1/messages") else events_of(text)[:-1]
    events = [event for event in events if event.get("type") != "ping"]
    last = events[-2] if path == "/v1/messages" else events[-1]
    found = explained(path, last["response"] if path == "/v1/responses" else last)
    for event in events:
        hold(kind, event)
    assert found["num_output_tokens"] == 4
    if path.endswith("completions"):
        assert last["choices"] == [] and "usage" not in last


def test_usage_and_explanation_come_in_one_chunk(api: Api) -> None:
    *_, last, done = api.stream("chat/completions", explain=True, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == last["explanation"]["num_output_tokens"] == 8
    assert done == "[DONE]"


def test_each_prompt_of_a_completion_has_its_own(api: Api) -> None:
    answer = api.complete(prompt=["hi", "hello there"], max_tokens=2, explain=True, n=2)
    first, second = answer["explanations"]
    assert first["num_prompt_tokens"] < second["num_prompt_tokens"]
    assert first["num_output_tokens"] == second["num_output_tokens"] == 4


def test_what_the_replys_format_changes_is_told(api: Api) -> None:
    api.llm = FakeLLM("hello", byte_tokenizer(HERMES, ["<tool_call>", "</tool_call>"]))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    found = api.chat(tools=[tool], tool_choice="required", max_tokens=100, explain=True)["explanation"]
    assert found["sampling"]["structured_outputs"] == {"value": "grammar", "source": "reply_format"}
    assert found["sampling"]["keep_special_tokens"]["source"] == "reply_format"
    assert found["grammar"]["kind"] == "grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages"])
def test_more_tokens_than_there_is_room_for_are_refused(api: Api, path: str, stream: bool) -> None:
    body, most, *_ = PATHS[path]
    error = api.refused(path, {**body, most: MAX_LEN, "stream": stream})
    assert (error["param"], error["code"]) == (most, "context_length_exceeded")
    room = int(error["message"].partition("at most ")[2].partition(",")[0])
    assert api.post(path, {**body, most: room}).status_code == 200
    assert api.post(path, {**body, most: room + 1}).status_code == 400
    assert not api.llm.num_unfinished


def test_the_older_name_is_named_where_it_was_used(api: Api) -> None:
    assert api.refused("/v1/chat/completions", {"messages": HI, "max_tokens": MAX_LEN})["param"] == "max_tokens"


def test_what_the_models_makers_recommend_is_cut_to_the_room_and_told(api: Api) -> None:
    api.settings["default_sampling"] = {"max_tokens": 1000}
    found = api.chat(max_tokens=None, explain=True)["explanation"]
    room = MAX_LEN - found["num_prompt_tokens"]
    assert found["truncation"] == {
        "asked": 1000,
        "source": "generation_config",
        "given": room,
        "max_model_len": MAX_LEN,
    }
    assert found["sampling"]["max_tokens"] == {"value": room, "source": "context"}


def test_anthropics_api_answers_as_far_as_there_is_room_and_says_so(api: Api) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 32_000, "explain": True}
    answer = api.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["explanation"]["truncation"]["asked"] == 32_000


def test_explanations_are_json_whatever_was_asked(api: Api) -> None:
    extremes = {"logit_bias": {"5": 1.5}, "stop": ["x"], "stop_token_ids": [9], "bad_words": ["no"], "seed": 3}
    answer = api.chat(explain=True, logprobs=True, top_logprobs=2, **extremes)
    sampling = json.loads(json.dumps(answer["explanation"]["sampling"]))
    assert {name: sampling[name]["value"] for name in extremes} == extremes
    assert sampling["logprobs"] == {"value": 2, "source": "request"}


def test_a_prompt_that_is_too_long_is_refused_as_such(api: Api) -> None:
    body = {"prompt": [5] * MAX_LEN, "max_tokens": MAX_LEN}
    error = api.refused("/v1/completions", body)
    assert (error["param"], error["code"]) == (None, "context_length_exceeded")


def test_an_answer_that_ends_early_has_no_more_tokens_than_it_has(api: Api) -> None:
    def script(_: NewRequest) -> list[int]:
        return [7, 8, EOS]

    api.llm = FakeLLM(script)
    found = api.chat(max_tokens=100, explain=True)["explanation"]
    assert found["num_output_tokens"] == 3
