"""Models, tokens, and the rules for all bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import TOKENIZER
from transfuse.server.errors import install_error_handlers
from transfuse.server.strict_json import StrictRoute


def test_models_are_listed_with_how_they_are_run(api: Api) -> None:
    answer = api.request("GET", "/v1/models").json()
    assert answer["object"] == "list"
    first, second = answer["data"]
    assert (first["id"], second["id"]) == ("fake", "alias")
    assert first == {
        "id": "fake",
        "object": "model",
        "created": first["created"],
        "owned_by": "transfuse",
        "root": "/models/fake",
        "max_model_len": 256,
        "implementation": "plain",
        "implementation_reason": "because",
    }


def test_one_model_by_name_slashes_included(api: Api) -> None:
    api.settings["served_model_names"] = ("org/model",)
    assert api.request("GET", "/v1/models/org/model").json()["id"] == "org/model"
    missing = api.request("GET", "/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert "'org/model'" in missing.json()["error"]["message"]


def test_a_text_as_tokens(api: Api) -> None:
    ids = TOKENIZER.encode("hello wörld")
    answer = api.post("/tokenize", {"prompt": "hello wörld"}).json()
    assert answer == {"count": len(ids) + 1, "max_model_len": 256, "tokens": [1, *ids], "token_strs": None}
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True, "model": "fake"}
    answer = api.post("/tokenize", body).json()
    assert (answer["tokens"], answer["token_strs"]) == (TOKENIZER.encode("hi"), ["h", "i"])
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == [1]


def test_messages_as_tokens(api: Api) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = api.post("/tokenize", body).json()["tokens"]
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "<s>user: hi</s><s>assistant: "
    tokens = api.post("/tokenize", {**body, "add_generation_prompt": False, "add_special_tokens": True}).json()[
        "tokens"
    ]
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "<s><s>user: hi</s>"
    assert api.refused("/tokenize", {**body, "chat_template": "x"})["param"] == "chat_template"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_a_text_or_messages(api: Api, body: dict[str, Any]) -> None:
    assert api.refused("/tokenize", body)["param"] == "prompt"


def test_tokens_as_a_text(api: Api) -> None:
    tokens = [1, *TOKENIZER.encode("日本 🙂")]
    assert api.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "<s>日本 🙂"}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert "token 1 is 100000" in api.refused("/detokenize", {"tokens": [5, 100_000]})["message"]
    for path in ("/tokenize", "/detokenize"):
        body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
        assert api.refused(path, {**body, "model": "nope"}, 404)["param"] == "model"


def read_strictly(content: bytes) -> httpx.Response:
    app, routes = FastAPI(), APIRouter(route_class=StrictRoute)

    @routes.post("/")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    app.include_router(routes)
    install_error_handlers(app)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
            return await client.post("/", content=content, headers={"content-type": "application/json"})

    return asyncio.run(send())


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": "\xff"}',
        b'{"a": 1' + b"0" * 5000 + b"}",
        b'{"a":' + b"[" * 100_000,
        b'{"a": 1} {}',
        b"{'a': 1}",
        b'{"a": 1, }',
    ],
)
def test_only_json_is_json(content: bytes) -> None:
    response = read_strictly(content)
    assert response.status_code == 400, response.text
    assert "JSON" in response.json()["error"]["message"]


def test_json_is_read() -> None:
    assert read_strictly('{"a": [1, 2.5, null, true, "日\\ud83d\\ude42"]}'.encode()).json() == {
        "a": [1, 2.5, None, True, "日🙂"]
    }


def test_the_schema_says_what_is_taken_and_what_comes_back(api: Api) -> None:
    schema = api.request("GET", "/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = schema["paths"][path]["post"]
        assert set(operation["responses"]) == {"200", "default"}
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = schema["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False
    assert {"prompt", "top_k", "min_p", "stop_token_ids", "suffix"} <= set(fields["properties"])
