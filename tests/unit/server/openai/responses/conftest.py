"""One application that remembers, and answers held against the types of the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import Response, ResponseStreamEvent

from tests.sdk_types import checked
from tests.unit.server.anthropic.conftest import named_events
from tests.unit.server.openai.conftest import Api


class ResponsesApi(Api):
    """Sends requests to one and the same application."""

    _app: FastAPI | None = None

    def app(self) -> FastAPI:
        self._app = self._app or super().app()
        return self._app

    def ask(self, given: Any = "hi", **body: Any) -> httpx.Response:
        return self.post("/v1/responses", {"input": given, "max_output_tokens": 8, **body})

    def response(self, given: Any = "hi", **body: Any) -> Response:
        answer = self.ask(given, **body)
        assert answer.status_code == 200, answer.text
        return checked(Response, answer.json())

    def events(self, given: Any = "hi", **body: Any) -> list[Any]:
        answer = self.ask(given, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return checked_events(answer.text)

    def messages(self) -> list[dict[str, Any]]:
        """What the template was given last."""
        found: list[dict[str, Any]] = self.llm.rendered[-1]["messages"]
        return found


def checked_events(text: str) -> list[Any]:
    """The events of a stream, which are numbered and of types that the client knows."""
    events = [checked(ResponseStreamEvent, event) for event in named_events(text)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def dumped(model: Any) -> Any:
    return json.loads(model.model_dump_json(exclude_unset=True, by_alias=True))


@pytest.fixture
def api() -> ResponsesApi:
    return ResponsesApi()
