"""Every error as HTTP status, body and headers."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from transfuse.errors import (
    CapacityError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    NonFiniteLogitsError,
    PromptError,
    QueueFullError,
    SamplingParamsError,
)
from transfuse.server.errors import FieldError, UnknownModelError, install_error_handlers, problem_of

SCOPE: Scope = {"path": "/v1/completions", "headers": []}
SECRET = "the secret of the server's inside"


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (SamplingParamsError("top_p", 3, "a number"), 400, "top_p", None),
        (FieldError("n", "n is too large.", "some_code"), 400, "n", "some_code"),
        (PromptError("The prompt has no tokens."), 400, None, None),
        (CapacityError("The prompt is too long."), 400, None, "context_length_exceeded"),
        (UnknownModelError("gpt-4", ["llama"]), 404, "model", "model_not_found"),
        (QueueFullError("Full.", retry_after=7), 429, None, "queue_full"),
        (EngineUnavailableError("Loading."), 503, None, "engine_unavailable"),
        (EngineDeadError("Died."), 503, None, "engine_unavailable"),
        (EngineClosedError("Closed."), 503, None, "engine_unavailable"),
        (NonFiniteLogitsError("NaN in id-1."), 500, None, "non_finite_logits"),
        (EngineError(SECRET), 500, None, "internal_error"),
        (RuntimeError(SECRET), 500, None, "internal_error"),
    ],
)
def test_errors_have_a_status_and_say_what_clients_may_know(
    error: Exception, status: int, param: str | None, code: str | None
) -> None:
    problem = problem_of(error, "id-1")
    assert (problem.status, problem.detail.param, problem.detail.code) == (status, param, code)
    assert ("Retry-After" in problem.headers) == (status in {429, 503})
    body = json.loads(problem.json(SCOPE))
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert SECRET not in problem.json(SCOPE)
    assert ("id-1" in problem.detail.message) == (status == 500)


def test_messages_name_the_field_as_the_api_does() -> None:
    detail = problem_of(SamplingParamsError("top_p", 3, "a number from 0 to 1"), "id").detail
    assert detail.message == "top_p is 3; expected a number from 0 to 1."
    assert detail.type == "invalid_request_error"


def test_a_full_queue_says_when_to_come_again() -> None:
    assert problem_of(QueueFullError("Full.", retry_after=7), "id").headers["Retry-After"] == "7"


def test_an_unknown_model_names_those_that_are_served() -> None:
    message = str(UnknownModelError("x" * 5000, ["llama", "tiny"]))
    assert "'llama', 'tiny'" in message
    assert len(message) < 400


def test_bodies_can_quote_what_is_no_valid_unicode() -> None:
    problem_of(FieldError("a\ud800", "\ud800 is no character"), "id").response(SCOPE)


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int


class Body(Inner):
    parts: list[Inner] = []


def send(method: str, path: str, **kwargs: Any) -> httpx.Response:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/body")
    async def take_body(body: Body) -> None: ...

    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, "I am a teapot.", {"X-Tea": "green"})

    @app.get("/left")
    async def left() -> None:
        raise ClientDisconnect

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError(SECRET)

    @app.get("/failed")
    async def failed() -> None:
        raise EngineError(SECRET)

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"request_id": "id-1"}}, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(request())


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"size": "1"}, "size", "size: Input should be a valid integer, got a string."),
        ({"size": True}, "size", "size: Input should be a valid integer, got true."),
        ({"size": 1.5}, "size", "size: Input should be a valid integer, got 1.5."),
        ({"size": 1, "parts": [{"size": 2}, {"size": None}]}, "parts[1].size", "got null."),
        ({"size": 1, "parts": [{"size": 2, "colour": 1}]}, "parts[0].colour", "There is no field parts[0].colour"),
        ({}, "size", "The field size is missing."),
        ({"size": [1, 2]}, "size", "got a list."),
        ({"size": {"a": SECRET}}, "size", "got an object."),
        ([1], None, "Send a JSON object as the body"),
        ("text", None, "Send a JSON object as the body"),
    ],
)
def test_bad_bodies_are_answered_with_the_field_and_what_is_wrong_with_it(
    body: Any, param: str | None, message: str
) -> None:
    response = send("POST", "/body", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert SECRET not in response.text


def test_many_errors_are_counted_not_listed() -> None:
    response = send("POST", "/body", json={"size": 1, "parts": [{"size": "x"}] * 500})
    assert response.json()["error"]["message"].endswith("And 497 more.")
    assert len(response.text) < 1000


def test_a_name_that_fills_the_message_is_cut() -> None:
    assert len(send("POST", "/body", json={"size": 1, "x" * 50_000: 1}).text) < 1000


@pytest.mark.parametrize("content", [b"{", b"{]", b'{"size": 1,}', b"\xff"])
def test_what_is_no_json_is_said_to_be_none(content: bytes) -> None:
    response = send("POST", "/body", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"] or "body" in response.json()["error"]["message"]


def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    missing = send("GET", "/v9/" + "x" * 5000)
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert len(missing.text) < 1000
    wrong = send("GET", "/body")
    assert wrong.status_code == 405
    assert "use POST" in wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


def test_a_route_s_own_status_message_and_headers_stay() -> None:
    response = send("GET", "/teapot")
    assert (response.status_code, response.headers["x-tea"]) == (418, "green")
    assert response.json()["error"]["message"] == "I am a teapot."


def test_a_client_that_has_left_is_no_failure() -> None:
    assert send("GET", "/left").status_code == 499


@pytest.mark.parametrize("path", ["/broken", "/failed"])
def test_failures_of_the_server_are_not_explained_to_clients(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "transfuse.server.errors"):
        response = send("GET", path)
    assert response.status_code == 500
    assert SECRET not in response.text
    assert "id-1" in response.json()["error"]["message"]
    # What is no error of ours is logged by the outermost middleware, to which it is raised again.
    assert len(caplog.records) == (path == "/failed")
