"""`/v1/messages` on a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anthropic.types import ErrorResponse, MessageTokensCount, ModelInfo

from tests.sdk_types import checked
from tests.unit.server.anthropic.conftest import HI, MessagesApi, named_events
from tests.unit.server.anthropic.test_writing import joined
from tests.unit.server.openai.asgi_client import heard_of_a_slow_model, leaves_nothing_behind
from tests.unit.server.openai.fake_llm import EOS, TOKENIZER, FakeLLM
from tests.unit.server.spoken import HERMES, speaking
from transfuse.errors import EngineDeadError, EngineUnavailableError, NonFiniteLogitsError, QueueFullError
from transfuse.server import responding


def test_an_answer_is_a_message(api: MessagesApi) -> None:
    message = api.message()
    assert message.id.startswith("msg_") and message.model == "fake"
    assert [block.text for block in message.content if block.type == "text"] == ["hello world"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    prompt = api.llm.core.requests[0].prompt_token_ids
    assert (usage.cache_read_input_tokens or 0) + usage.input_tokens == len(prompt)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (1, 8)


def test_a_stream_joins_to_the_message(api: MessagesApi) -> None:
    whole = api.message()
    start, *middle, delta, stop = api.events()
    assert [start.type, delta.type, stop.type] == ["message_start", "message_delta", "message_stop"]
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.input_tokens == whole.usage.input_tokens
    assert [middle[0].type, middle[-1].type] == ["content_block_start", "content_block_stop"]
    assert {event.index for event in middle} == {0}
    text = "".join(event.delta.text for event in middle[1:-1])
    assert text == "hello world"
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("max_tokens", None)
    assert delta.usage.output_tokens == whole.usage.output_tokens
    assert delta.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "wor"]}, "stop_sequence", "wor"),
        ({"max_tokens": 100_000}, "model_context_window_exceeded", None),
    ],
)
def test_why_it_ended(api: MessagesApi, body: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = api.message(**body)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    *_, delta, _ = api.events(**body)
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (reason, sequence)


def test_a_model_that_says_nothing_ends_its_turn(api: MessagesApi) -> None:
    api.llm = FakeLLM(lambda _: [EOS])
    message = api.message()
    assert (message.content, message.stop_reason) == ([], "end_turn")
    api.llm = FakeLLM(lambda _: [EOS])
    assert [event.type for event in api.events()] == ["message_start", "message_delta", "message_stop"]


def test_sampling_is_as_the_request_says_and_else_as_the_model_says(api: MessagesApi) -> None:
    api.settings["default_sampling"] = {"temperature": 0.3, "top_k": 7, "max_tokens": 5}
    api.message(top_p=0.5, top_k=3)
    params = api.llm.core.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.5, 3, 8)


def test_tokens_are_counted_without_an_answer(api: MessagesApi) -> None:
    response = api.post("/v1/messages/count_tokens", {"model": "fake", "messages": HI, "system": "Be brief."})
    assert response.status_code == 200, response.text
    count = checked(MessageTokensCount, response.json())
    assert api.llm.core.requests == []
    message = api.message(system="Be brief.")
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_models_are_listed_for_clients_of_this_api(api: MessagesApi) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = api.request("GET", "/v1/models", headers=headers).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "fake", "alias")
    assert [checked(ModelInfo, each).id for each in page["data"]] == ["fake", "alias"]
    one = checked(ModelInfo, api.request("GET", "/v1/models/alias", headers=headers).json())
    assert (one.id, one.max_input_tokens) == ("alias", 255)
    missing = api.request("GET", "/v1/models/other", headers=headers)
    assert checked(ErrorResponse, missing.json()).error.type == "not_found_error"
    assert api.request("GET", "/v1/models").json()["object"] == "list"


def test_another_version_of_the_api_is_refused(api: MessagesApi) -> None:
    body = {"model": "fake", "max_tokens": 1, "messages": HI}
    assert api.request("POST", "/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}).is_success
    response = api.request("POST", "/v1/messages", json=body, headers={"anthropic-version": "2042-01-01"})
    assert response.status_code == 400
    assert "anthropic-version" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFullError("Full.", retry_after=3), 429, "rate_limit_error"),
        (EngineUnavailableError("Loading."), 503, "overloaded_error"),
        (RuntimeError("inside"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_answer_has_a_status(
    api: MessagesApi, refusal: Exception, status: int, kind: str, stream: bool
) -> None:
    api.llm.refusal = refusal
    response = api.ask(stream=stream)
    assert response.status_code == status
    assert checked(ErrorResponse, response.json()).error.type == kind
    assert "inside" not in response.text


def test_a_failure_in_a_stream_is_its_last_event(api: MessagesApi) -> None:
    api.llm.failure = (4, NonFiniteLogitsError("The model gave NaN."))
    events = named_events(api.ask(stream=True).text)
    error = checked(ErrorResponse, events[-1])
    assert (error.error.type, error.error.message) == ("api_error", "The model gave NaN.")
    assert events[0]["type"] == "message_start"
    assert "message_stop" not in {event["type"] for event in events}
    api.llm = FakeLLM()
    api.llm.failure = (4, EngineDeadError("It died."))
    response = api.ask()
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/messages", {}), ("/v1/models", {"anthropic-version": "2023-06-01"})]
)
def test_without_a_key_the_error_has_the_apis_own_shape(api: MessagesApi, path: str, headers: dict[str, str]) -> None:
    api.settings["api_keys"] = ("the-key",)
    refused = api.request("GET", path, headers=headers)
    assert refused.status_code == 401
    error = checked(ErrorResponse, refused.json())
    assert error.error.type == "authentication_error"
    assert error.request_id == refused.headers["request-id"] == refused.headers["x-request-id"]
    body = {"model": "fake", "max_tokens": 1, "messages": HI}
    assert api.request("POST", "/v1/messages", json=body, headers={"x-api-key": "the-key"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(api: MessagesApi, stream: bool) -> None:
    body = {"model": "fake", "max_tokens": 200, "messages": HI, "stream": stream}
    asyncio.run(leaves_nothing_behind(api, "/v1/messages", body))


def test_a_client_hears_of_the_server_while_the_model_is_not_done(
    api: MessagesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "PAUSE_SECONDS", 0.02)
    body = {"model": "fake", "max_tokens": 4, "messages": HI, "stream": True}
    events = named_events(asyncio.run(heard_of_a_slow_model(api, "/v1/messages", body)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[1:4] == ["ping"] * 3 and kinds[-1] == "message_stop"
    prompt = api.llm.core.requests[0].prompt_token_ids
    assert events[0]["message"]["usage"]["input_tokens"] == len(prompt)
    assert events[-2]["usage"]["cache_read_input_tokens"] == 1


def test_the_prompt_is_laid_out_by_the_template(api: MessagesApi) -> None:
    api.message(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    (new,) = api.llm.core.requests
    text = TOKENIZER.decode(new.prompt_token_ids, skip_special_tokens=False)
    assert text == "<s>system: Be brief.</s><s>user: hi</s><s>assistant: "


TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


def test_thinking_and_calls_have_blocks_of_their_own(api: MessagesApi) -> None:
    api.settings["chat_template"] = HERMES
    api.llm = speaking()
    body: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200}
    message = api.message(**body)
    thinking, text, first, second = message.content
    assert thinking.type == "thinking" and thinking.thinking.strip() == "I look."
    assert text.type == "text" and text.text.strip() == "Let me see."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input, second.input) == ("look", {"at": "it"}, {})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    details = message.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < message.usage.output_tokens
    api.llm = speaking()
    events = api.events(**body)
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens_details) == ("tool_use", details)
    again = joined(events[1:-2])
    for block, other in zip(message.content, again, strict=True):
        assert block.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


def test_calls_can_be_limited_to_one_and_to_none(api: MessagesApi) -> None:
    api.settings["chat_template"] = HERMES
    for choice, num in [({"type": "auto", "disable_parallel_tool_use": True}, 1), ({"type": "none"}, 0)]:
        api.llm = speaking()
        message = api.message(tools=[TOOL], tool_choice=choice, max_tokens=200)
        assert sum(block.type == "tool_use" for block in message.content) == num
        assert message.stop_reason == ("tool_use" if num else "end_turn")


def test_thinking_that_is_cut_off_is_no_text(api: MessagesApi) -> None:
    api.settings["chat_template"] = HERMES
    api.llm = speaking()
    message = api.message(max_tokens=14)
    assert [block.type for block in message.content] == ["thinking"]
    assert message.stop_reason == "max_tokens"
    api.llm = speaking()
    hidden = api.message(max_tokens=14, thinking={"type": "adaptive", "display": "omitted"})
    (block,) = hidden.content
    assert block.type == "thinking" and (block.thinking, bool(block.signature)) == ("", True)


def test_a_template_without_tools_takes_none(api: MessagesApi) -> None:
    api.settings["chat_template"] = "{{ messages[0].content }}"
    assert "lays out no tools" in api.error(tools=[TOOL])
