"""The application in front of a scripted model, asked as Anthropic's clients ask."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent

from tests.sdk_types import checked
from tests.unit.server.openai.conftest import Api

HI: list[Any] = [{"role": "user", "content": "hi"}]


class MessagesApi(Api):
    """Sends requests, and holds answers against the types of the official client."""

    def ask(self, path: str = "/v1/messages", **body: Any) -> httpx.Response:
        return self.post(path, {"model": "fake", "max_tokens": 8, "messages": HI, **body})

    def message(self, **body: Any) -> Message:
        response = self.ask(**body)
        assert response.status_code == 200, response.text
        return checked(Message, response.json())

    def events(self, **body: Any) -> list[Any]:
        """The events of a stream but for pings."""
        response = self.ask(stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = named_events(response.text)
        return [checked(RawMessageStreamEvent, event) for event in events if event["type"] != "ping"]

    def error(self, status: int = 400, **body: Any) -> str:
        """What the error says that a body is answered with."""
        response = self.ask(**body)
        assert response.status_code == status, response.text
        error = checked(ErrorResponse, response.json())
        assert error.request_id == response.headers["request-id"]
        return error.error.message


def named_events(text: str) -> list[dict[str, Any]]:
    """The data of events, each under the name that is its type."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def api() -> MessagesApi:
    return MessagesApi()
