"""The official client of the Anthropic API against the server: a tiny Llama in its own process, HTTP on a port here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message

from tests.e2e.server_thread import KEY, MODEL, Server
from tests.sdk_types import checked

pytestmark = pytest.mark.usefixtures("left_idle")
MESSAGES: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Wörter 🙂"}]}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "system": "Be brief.", **GREEDY}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=20) as made:
        yield made


def texts(message: Message) -> list[str]:
    return [block.text for block in message.content if block.type == "text"]


def test_a_message(client: Anthropic) -> None:
    response = client.messages.with_raw_response.create(**ASK, max_tokens=8)
    checked(Message, json.loads(response.text()))
    message = response.parse()
    assert message._request_id and message.id == f"msg_{message._request_id}"
    assert (message.role, message.model) == ("assistant", MODEL)
    assert message.usage.output_tokens == 8
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_streaming_helper_makes_the_same_message(client: Anthropic) -> None:
    whole = client.messages.create(**ASK, max_tokens=24)
    with client.messages.stream(**ASK, max_tokens=24) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts(whole) == texts(final) == [text]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = list(client.messages.create(**ASK, max_tokens=4, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    for event in events:
        checked(anthropic.types.RawMessageStreamEvent, event.to_dict())


def test_a_stop_sequence_never_shows(client: Anthropic) -> None:
    (text,) = texts(client.messages.create(**ASK, max_tokens=24))
    stop = text[4:7]
    cut = client.messages.create(**ASK, max_tokens=24, stop_sequences=[stop])
    assert texts(cut) == [text[: text.index(stop)]]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_a_repeated_prompt_is_read_from_the_cache(client: Anthropic) -> None:
    body: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "again and again " * 12}]}
    body["system"] = "Nobody else says this."
    first, second = (client.messages.create(**body, max_tokens=1).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens and second.cache_creation_input_tokens == 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_an_answer_that_fills_the_context_says_so(client: Anthropic) -> None:
    body: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "x " * 100}]}
    message = client.messages.create(**body, max_tokens=4000, stop_sequences=["<never>"])
    assert message.stop_reason in {"model_context_window_exceeded", "end_turn"}
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        client.messages.create(**{**body, "messages": [{"role": "user", "content": "x " * 900}]}, max_tokens=1)


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model


def test_each_error_has_its_class(server: Server, client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**{**ASK, "extra_body": {"temperature": -1}}, max_tokens=1)
    assert bad.value.type == "invalid_request_error" and bad.value.request_id
    checked(anthropic.types.ErrorResponse, bad.value.body)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="'image' is not read"):
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=1)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "claude-9"}, max_tokens=1)
    assert missing.value.type == "not_found_error"
    with (
        Anthropic(base_url=server.url, api_key="wrong-key", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**ASK, max_tokens=1)
    with Anthropic(base_url=server.url, auth_token=KEY, api_key=None, max_retries=0) as bearer:
        assert bearer.messages.create(**ASK, max_tokens=1).role == "assistant"


def test_the_async_client(server: Server) -> None:
    async def run() -> None:
        async with AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=20) as client:

            async def stream(number: int) -> Any:
                messages: list[Any] = [{"role": "user", "content": f"Number {number}"}]
                async with client.messages.stream(**{**ASK, "messages": messages}, max_tokens=16) as stream:
                    return (await stream.get_final_message()).content

            together = await asyncio.gather(*map(stream, range(6)))
            assert together == [await stream(number) for number in range(6)]

    asyncio.run(run())


@pytest.mark.parametrize("read", [0, 6])
def test_a_stream_that_is_closed_is_aborted(server: Server, client: Anthropic, read: int) -> None:
    stream = client.messages.create(**ASK, max_tokens=450, stream=True)
    for _ in range(read):
        next(stream)
    stream.close()
    server.wait_idle()


def test_an_answer_is_held_to_a_schema(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "hi"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert answer.content[0].type == "text"
    assert json.loads(answer.content[0].text) in ({"n": 1}, {"n": 2})


def test_a_message_explains_itself(client: Anthropic) -> None:
    ask: dict[str, Any] = {**ASK, "max_tokens": 4, "extra_headers": {"x-explain": "1"}}
    message = client.messages.create(**ask)
    assert (message.model_extra or {})["explanation"]["num_output_tokens"] == 4
    with client.messages.stream(**ask) as stream:
        events = list(stream)
        assert texts(stream.get_final_message()) == texts(message)
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert (delta.model_extra or {})["explanation"]["sampling"]["temperature"]["source"] == "request"
