"""`/v1/responses` on a scripted model."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItemList
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from tests.sdk_types import checked
from tests.unit.server.openai.asgi_client import heard_of_a_slow_model, leaves_nothing_behind
from tests.unit.server.openai.fake_llm import EOS, FakeLLM
from tests.unit.server.openai.responses.conftest import ResponsesApi, checked_events
from tests.unit.server.openai.responses.test_requests import GROUP, LOOK, PATCH
from tests.unit.server.spoken import HERMES, speaking
from transfuse.errors import NonFiniteLogitsError, QueueFullError
from transfuse.server import responding
from transfuse.server.openai.responses import routes
from transfuse.server.openai.responses.store import ResponseStore
from transfuse.server.replies import ReplyReader

USER = {"role": "user", "content": "hi"}


def test_an_answer_is_a_response(api: ResponsesApi) -> None:
    response = api.response(instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert response.id.startswith("resp_") and response.model == "fake"
    assert response.output_text == "hello world"
    (message,) = response.output
    assert message.type == "message" and message.id.startswith("msg_")
    assert (response.status, message.status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "u")
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(api.llm.core.requests[0].prompt_token_ids)
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (8, 1)
    assert usage.total_tokens == usage.input_tokens + 8


def test_a_stream_has_every_event_and_ends_with_the_whole(api: ResponsesApi) -> None:
    whole = api.response()
    events = api.events()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    assert events[2].item.content == [] and events[2].item.id == events[-2].item.id
    last = events[-1].response
    assert last.output == [events[-2].item]
    volatile = {"id", "created_at", "completed_at", "output"}
    assert last.model_dump(exclude=volatile) == whole.model_dump(exclude=volatile)
    assert last.output_text == whole.output_text
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_ends_by_itself_completes_the_response(api: ResponsesApi, stream: bool) -> None:
    api.llm = FakeLLM(lambda _: [EOS])
    response = api.events()[-1].response if stream else api.response()
    assert (response.status, response.output, response.incomplete_details) == ("completed", [], None)
    assert response.completed_at >= response.created_at


def test_a_conversation_goes_on_with_what_is_remembered(api: ResponsesApi) -> None:
    first = api.response("one", instructions="Be brief.")
    second = api.response("two", previous_response_id=first.id)
    third = api.events("three", previous_response_id=second.id)[-1].response
    assert third.previous_response_id == second.id
    said = [(message["role"], message["content"]) for message in api.messages()]
    answer = ("assistant", "hello world")
    assert said == [("user", "one"), answer, ("user", "two"), answer, ("user", "three")]


def test_what_is_not_remembered_is_named(api: ResponsesApi) -> None:
    kept = api.response(store=False)
    refused = api.ask(previous_response_id=kept.id)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "previous_response_id"
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert api.request("GET", f"/v1/responses/{kept.id}").status_code == 404


def test_a_response_can_be_read_again_and_forgotten(api: ResponsesApi) -> None:
    response = api.response([USER, {"role": "developer", "content": "x"}])
    path = f"/v1/responses/{response.id}"
    assert checked(Response, api.request("GET", path).json()) == response
    assert api.request("GET", path, params={"stream": True}).status_code == 400
    cancelled = api.post(f"{path}/cancel", {})
    assert cancelled.status_code == 400 and "has ended" in cancelled.json()["error"]["message"]
    assert api.request("DELETE", path).json() == {"id": response.id, "object": "response", "deleted": True}
    for method, where in [("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")]:
        missing = api.request(method, where, **({"json": {}} if method == "POST" else {}))
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_the_holder_of_another_key_sees_nothing(api: ResponsesApi) -> None:
    api.settings["api_keys"] = ("mine", "yours")
    mine, yours = ({"x-api-key": key} for key in ("mine", "yours"))
    body: dict[str, Any] = {"input": [{**USER, "id": "msg_1"}], "max_output_tokens": 1}
    made = api.request("POST", "/v1/responses", json=body, headers=mine).json()
    path = f"/v1/responses/{made['id']}"
    for method in ("GET", "DELETE"):
        assert api.request(method, path, headers=yours).status_code == 404
    for more in ({"previous_response_id": made["id"]}, {"input": [{"id": "msg_1"}]}):
        assert api.request("POST", "/v1/responses", json=body | more, headers=yours).status_code == 400
        assert api.request("POST", "/v1/responses", json=body | more, headers=mine).status_code == 200
    assert api.request("GET", path, headers=mine).status_code == 200


def test_input_items_are_listed_in_pages(api: ResponsesApi) -> None:
    items: list[Any] = [
        {**USER, "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    path = f"/v1/responses/{api.response(items).id}/input_items"
    page = api.request("GET", path, params={"order": "asc"}).json()
    listed = checked(ResponseItemList, page)
    assert [item.type for item in listed.data] == ["message", "message", *(item["type"] for item in items[2:])]
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, listed.data[0].id, listed.data[-1].id)
    seen: list[str] = []
    while True:
        page = api.request("GET", path, params={"limit": 3, **({"after": seen[-1]} if seen else {})}).json()
        seen += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
    assert seen == [item.id for item in reversed(listed.data)]
    assert api.request("GET", path, params={"after": "nothing"}).status_code == 400
    assert api.request("GET", path, params={"limit": 0}).status_code == 400


def test_a_reference_stands_for_an_item(api: ResponsesApi) -> None:
    first = api.response("one")
    api.response([{"type": "item_reference", "id": first.output[0].id}, USER])
    assert [message["content"] for message in api.messages()] == ["hello world", "hi"]


def test_one_item_is_not_referred_to_twice(api: ResponsesApi) -> None:
    item = api.response("one").output[0].id
    refused = api.ask([{"type": "item_reference", "id": item}, USER, {"id": item}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2].id")


def test_what_a_request_says_beside_its_items_takes_room_in_memory(
    api: ResponsesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "ResponseStore", partial(ResponseStore, max_bytes=20_000))
    kept, left = api.response(user="u" * 10_000), api.response(user="u" * 20_000)
    assert api.request("GET", f"/v1/responses/{kept.id}").status_code == 200
    assert api.request("GET", f"/v1/responses/{left.id}").status_code == 404


def test_tokens_are_counted_without_an_answer(api: ResponsesApi) -> None:
    first = api.response("one")
    body = {"input": "two", "previous_response_id": first.id, "instructions": "Be brief."}
    counted = checked(InputTokenCountResponse, api.post("/v1/responses/input_tokens", body).json())
    usage = api.response("two", previous_response_id=first.id, instructions="Be brief.").usage
    assert usage is not None and usage.input_tokens == counted.input_tokens
    assert len(api.llm.core.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_answer_has_a_status(api: ResponsesApi, stream: bool) -> None:
    api.llm.refusal = QueueFullError("Full.", retry_after=3)
    answer = api.ask(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_cannot_be_read_from_its_start_on_has_a_status(
    api: ResponsesApi, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ReplyReader, "advance", fail)
    answer = api.ask(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_a_failure_in_a_stream_fails_the_response(api: ResponsesApi) -> None:
    api.llm.failure = (4, NonFiniteLogitsError("The model gave NaN."))
    *_, last = api.events()
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert last.response.error.message == "The model gave NaN."
    assert api.request("GET", f"/v1/responses/{last.response.id}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(api: ResponsesApi, stream: bool) -> None:
    asyncio.run(leaves_nothing_behind(api, "/v1/responses", {"input": "hi", "stream": stream}))


def test_a_client_hears_of_the_server_while_the_model_is_not_done(
    api: ResponsesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "PAUSE_SECONDS", 0.02)
    body = {"input": "hi", "stream": True, "max_output_tokens": 2}
    text = asyncio.run(heard_of_a_slow_model(api, "/v1/responses", body))
    assert text.count(": keep-alive\n\n") >= 3
    kinds = [event.type for event in checked_events(text.replace(": keep-alive\n\n", ""))]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"


def test_reasoning_and_calls_are_items_of_their_own(api: ResponsesApi) -> None:
    api.settings["chat_template"] = HERMES
    api.llm = speaking()
    body: dict[str, Any] = {"tools": [LOOK], "max_output_tokens": 200}
    response = api.response(**body)
    reasoning, message, first, second = response.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text.strip() == "I look."
    assert message.type == "message" and response.output_text.strip() == "Let me see."
    assert first.type == second.type == "function_call"
    assert (first.name, json.loads(first.arguments), second.arguments) == ("look", {"at": "it"}, "{}")
    assert response.status == "completed"
    usage = response.usage
    assert usage is not None and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    events = api.events(**body)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    own = {"id", "call_id"}
    assert [item.model_dump(exclude=own) for item in done] == [item.model_dump(exclude=own) for item in response.output]


def test_a_call_is_answered_by_going_on(api: ResponsesApi) -> None:
    api.settings["chat_template"] = HERMES
    api.llm = speaking('<think>\nHm.\n</think>\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>')
    first = api.response("one", tools=[LOOK], max_output_tokens=200)
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a box"}
    api.response([result], previous_response_id=first.id, tools=[LOOK], max_output_tokens=1)
    user, assistant, tool = api.messages()
    assert user == {"role": "user", "content": "one"}
    assert assistant["reasoning_content"].strip() == "Hm."
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == call.call_id
    assert (tool["name"], tool["content"]) == ("look", "a box")


def test_custom_tools_and_namespaces_come_back_as_they_were_offered(api: ResponsesApi) -> None:
    api.settings["chat_template"] = HERMES
    api.llm = speaking(
        '<tool_call>\n{"name": "patch", "arguments": {"input": "xx"}}\n</tool_call>'
        '<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>'
    )
    custom, spawned = api.response(tools=[PATCH, GROUP], max_output_tokens=200).output
    assert custom.type == "custom_tool_call" and (custom.name, custom.input) == ("patch", "xx")
    assert spawned.type == "function_call" and (spawned.name, spawned.namespace) == ("spawn", "agents")
