"""The application in front of a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.unit.server.openai.fake_llm import FakeLLM, events_of
from transfuse.server.app import create_app
from transfuse.server.settings import ServerSettings


class Api:
    """Sends requests to an application, each in an event loop of its own.

    Attributes:
        llm: the model; replace it before the first request.
        settings: of the server.
    """

    def __init__(self) -> None:
        self.llm = FakeLLM()
        self.settings: dict[str, Any] = {"served_model_names": ("fake", "alias")}

    def app(self) -> FastAPI:
        return create_app(self.llm, ServerSettings(**self.settings))  # type: ignore[arg-type]

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(send())

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.request("POST", path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        return _good(self.post("/v1/completions", {"prompt": "hi", **body}))

    def chat(self, content: Any = "hi", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return _good(self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, **body}))

    def stream(self, path: str, **body: Any) -> list[Any]:
        body = {"stream": True, "max_tokens": 8, **body}
        body.update({"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]})
        response = self.post(f"/v1/{path}", body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(response.text)

    def refused(self, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """The error that a body is answered with."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def _good(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def api() -> Api:
    return Api()
