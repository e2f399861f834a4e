"""The official client against the server: a tiny Llama in its own process, HTTP on a port of this machine."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.server_thread import KEY, MODEL, Server

pytestmark = pytest.mark.usefixtures("left_idle")
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wörter 🙂"}]


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.object) == (MODEL, "transfuse", "model")
    assert model.model_dump()["implementation"] == "plain"
    assert client.models.retrieve(MODEL) == model


def test_chat(client: OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    answer = response.parse()
    assert response.headers["x-request-id"] and answer.id == f"chatcmpl-{response.headers['x-request-id']}"
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_chat_streams_the_same_text(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "n": 2}
    body["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**body)
    texts = ["", ""]
    ends: list[Any] = [None, None]
    usage = None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_the_streaming_helper_of_the_client_understands_the_chunks(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**body).choices[0].message.content
    assert text is not None
    # The helper takes an answer that is cut short for an error.
    with client.chat.completions.stream(**body, stop=text[5:7]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[5:7])]


def test_chat_logprobs(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == 6
    for token in content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
    joined = bytes(byte for token in content for byte in token.bytes or ())
    assert joined.decode(errors="replace") == choice.message.content
    streamed = [
        token
        for chunk in client.chat.completions.create(**body, stream=True)
        for each in chunk.choices
        if each.logprobs is not None
        for token in each.logprobs.content or ()
    ]
    assert streamed == content


def test_completions_of_several_prompts(client: OpenAI) -> None:
    prompts = ["The", "A b", "日本"]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    together = client.completions.create(prompt=prompts, n=2, **body)
    assert [choice.index for choice in together.choices] == list(range(6))
    for index, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, **body).choices[0].text
        assert [choice.text for choice in together.choices[2 * index : 2 * index + 2]] == [alone, alone]


def test_completion_streams_the_same_text_and_logprobs(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": ["The", "Wör"], "max_tokens": 12, "temperature": 0}
    body |= {"logprobs": 2, "echo": True}
    whole = client.completions.create(**body)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert texts == [choice.text for choice in whole.choices]
    assert [text[:3] for text in texts] == ["The", "Wör"]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]


def test_a_seed_repeats_and_its_continuations_differ(client: OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        body: dict[str, Any] = {"model": MODEL, "prompt": "The", "max_tokens": 16, "temperature": 1.0}
        return [choice.text for choice in client.completions.create(**body, n=3, seed=seed).choices]

    assert sample(5) == sample(5) != sample(6)
    assert len(set(sample(5))) == 3


def test_a_stop_string_never_shows(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "The", "max_tokens": 32, "temperature": 0}
    text = client.completions.create(**body).choices[0].text
    stop = text[4:7]
    cut = client.completions.create(**body, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.model_dump()["stop_reason"]) == ("stop", stop)
    chunks = client.completions.create(**body, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text


def test_vllms_fields_go_through_extra_body(client: OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 4, "return_token_ids": True, "prompt_logprobs": 1}
    answer = client.completions.create(model=MODEL, prompt="The", max_tokens=4, extra_body=extra)
    choice = answer.choices[0].model_dump()
    assert len(choice["token_ids"]) == 4
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


def test_tokenize_and_back(server: Server, client: OpenAI) -> None:
    root = client.with_options(base_url=server.url)
    found: Any = root.post("/tokenize", cast_to=object, body={"prompt": "Wörter 🙂", "add_special_tokens": False})
    back: Any = root.post("/detokenize", cast_to=object, body={"tokens": found["tokens"]})
    assert back == {"prompt": "Wörter 🙂"}
    prompt: list[int] = found["tokens"]
    by_ids = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    by_text = client.completions.create(
        model=MODEL, prompt="Wörter 🙂", max_tokens=4, temperature=0, extra_body={"add_special_tokens": False}
    )
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_each_error_has_its_class(server: Server, client: OpenAI) -> None:
    create = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, prompt="x", extra_body={"top_kk": 1})
    assert bad.value.param == "top_kk"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, prompt="x " * 600)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"not supported: .*uniqueItems") as bad:
        create(model=MODEL, prompt="x", extra_body={"structured_outputs": {"json": {"uniqueItems": True}}})
    assert bad.value.code == "invalid_structured_outputs"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="asked to embed") as bad:
        client.embeddings.create(model=MODEL, input="x")
    assert bad.value.code == "wrong_task"
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_full_queue_is_a_rate_limit(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", n=33)
    assert bad.value.param == "n"

    def ask(_: int) -> str:
        try:
            client.completions.create(model=MODEL, prompt="x", n=8, max_tokens=100, extra_body={"ignore_eos": True})
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            return "limited"
        return "served"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(ask, range(8)))
    assert outcomes.count("served") >= 4
    assert "limited" in outcomes


def test_the_async_client(server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
            body: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0}

            async def stream(number: int) -> str:
                chunks = await client.completions.create(**body, prompt=f"Number {number}:", stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            streamed = await asyncio.gather(*map(stream, range(12)))
            whole = [await client.completions.create(**body, prompt=f"Number {number}:") for number in range(12)]
            assert streamed == [answer.choices[0].text for answer in whole]

    asyncio.run(run())


@pytest.mark.parametrize("read", [0, 3])
def test_a_stream_that_is_closed_is_aborted(server: Server, client: OpenAI, read: int) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 450, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**body, n=4, stream=True)
    for _ in range(read):
        next(stream)
    assert server.llm.num_unfinished > 0
    stream.close()
    server.wait_idle()


def test_a_request_that_is_given_up_is_aborted(server: Server, client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 450, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(**body, n=8)
    server.wait_idle()


class Leg(BaseModel):
    mode: Literal["train", "bus", "foot"]
    minutes: Annotated[int, Field(ge=1, le=90)]


class Journey(BaseModel):
    start: Literal["here", "there"]
    leg: Leg


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Journey, n=3, seed=1, max_completion_tokens=400
    )
    assert all(isinstance(choice.message.parsed, Journey) for choice in answer.choices)


def test_a_pydantic_model_is_parsed_from_a_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Leg, seed=3, max_completion_tokens=400
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Leg)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[ab]"}}, "[0-9]{3}-[ab]"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_grammar": 'root ::= "<" [xy]{2} ">"'}, "<[xy]{2}>"),
    ],
    ids=str,
)
def test_the_other_forms_hold_too(client: OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=50, n=3, extra_body=extra)
    assert all(re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop" for choice in answer.choices)


def test_an_answer_explains_itself(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0, "extra_body": {"explain": True}}
    answer = client.chat.completions.create(**ask, messages=MESSAGES)
    found = (answer.model_extra or {})["explanation"]
    assert found["sampling"]["temperature"] == {"value": 0.0, "source": "request"}
    assert found["implementation"]["name"] == "plain"
    assert found["num_output_tokens"] == 4
    assert 0 < found["prefill_seconds"] < found["total_seconds"]
    chunks = list(client.chat.completions.create(**ask, messages=MESSAGES, stream=True))
    streamed = (chunks[-1].model_extra or {})["explanation"]
    assert streamed["sampling"] == found["sampling"] and not chunks[-1].choices
    text = client.completions.create(**ask, prompt=["one", "two"])
    assert len((text.model_extra or {})["explanations"]) == 2
