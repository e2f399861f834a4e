"""The official client of the Responses API against the server: a tiny Llama in its own process, HTTP on a port here."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, Field

from tests.e2e.server_thread import KEY, MODEL, Server
from tests.sdk_types import checked

pytestmark = pytest.mark.usefixtures("left_idle")
ASK: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "temperature": 0}


def test_a_response(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(**ASK, input="Wörter 🙂", max_output_tokens=8)
    checked(Response, json.loads(raw.text))
    response = raw.parse()
    assert response.output_text and response.usage is not None
    assert response.usage.output_tokens == 8
    counted = client.responses.input_tokens.count(model=MODEL, instructions="Be brief.", input="Wörter 🙂")
    assert counted.input_tokens == response.usage.input_tokens


def test_the_streaming_helper_makes_the_same_response(client: OpenAI) -> None:
    whole = client.responses.create(**ASK, input="x", max_output_tokens=24)
    with client.responses.stream(**ASK, input="x", max_output_tokens=24) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    events = list(client.responses.create(**ASK, input="x", max_output_tokens=24, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        checked(ResponseStreamEvent, event.to_dict())
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text


def test_a_conversation_is_gone_on_with_read_and_forgotten(client: OpenAI) -> None:
    first = client.responses.create(**ASK, input="one", max_output_tokens=4)
    second = client.responses.create(**ASK, input="two", previous_response_id=first.id, max_output_tokens=4)
    by_hand: Any = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
    again = client.responses.create(**ASK, input=by_hand, max_output_tokens=4)
    assert again.output_text == second.output_text
    assert second.usage is not None and again.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id) == second
    page = client.responses.input_items.list(second.id, order="asc")
    checked(ResponseItemList, {"object": "list", **page.to_dict()})
    assert [item.type for item in page] == ["message", "message", "message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(**ASK, input="three", previous_response_id=second.id, max_output_tokens=1)
    assert third.previous_response_id == second.id, "what it goes on with is whole"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input="four", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(second.id)


def test_what_is_not_served_has_a_named_error(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input="x", tools=[{"type": "web_search"}])
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input="x", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input="x " * 900)
    assert refused.value.code == "context_length_exceeded"


def test_the_async_client(server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:

            async def stream(number: int) -> str:
                body: dict[str, Any] = {**ASK, "input": f"Number {number}", "max_output_tokens": 16}
                text = ""
                async for event in await client.responses.create(**body, stream=True, store=False):
                    text += event.delta if event.type == "response.output_text.delta" else ""
                return text

            together = await asyncio.gather(*map(stream, range(6)))
            assert together == [await stream(number) for number in range(6)]

    asyncio.run(run())


@pytest.mark.parametrize("read", [0, 5])
def test_a_stream_that_is_closed_is_aborted(server: Server, client: OpenAI, read: int) -> None:
    stream = client.responses.create(**ASK, input="x", max_output_tokens=450, stream=True)
    for _ in range(read):
        next(stream)
    stream.close()
    server.wait_idle()


class Leg(BaseModel):
    mode: Literal["train", "bus", "foot"]
    minutes: Annotated[int, Field(ge=1, le=90)]


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="hi", text_format=Leg, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Leg)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


def test_a_response_explains_itself(client: OpenAI) -> None:
    ask: dict[str, Any] = {**ASK, "input": "hi", "max_output_tokens": 4, "extra_body": {"explain": True}}
    response = client.responses.create(**ask)
    assert (response.model_extra or {})["explanation"]["num_output_tokens"] == 4
    with client.responses.stream(**ask) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    assert (last.response.model_extra or {})["explanation"]["sampling"]["max_tokens"]["value"] == 4
