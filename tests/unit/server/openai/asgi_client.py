"""A client at the level of ASGI, that leaves when it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import FakeLLM


class Client:
    """A client at the level of ASGI, that leaves when it likes; its server sees that as uvicorn shows it."""

    def __init__(self, api: Api, path: str, body: dict[str, Any]) -> None:
        self.app = api.app()
        self.admission = self.app.state.admission
        self.left = asyncio.Event()
        self.chunks: list[bytes] = []
        self.status = 0
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("api", 80),
            "client": ("me", 1),
            "headers": [(b"content-type", b"application/json")],
        }
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.chunks.append(message["body"])

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.app(self._scope, self.receive, self.send))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def leaves_nothing_behind(api: Api, path: str, body: dict[str, Any]) -> None:
    """Sends a request, leaves while it is answered, and looks that it ended."""
    api.llm = FakeLLM()
    client = Client(api, path, body)
    response = client.start()
    await until(lambda: bool(api.llm.core.running))
    await until(lambda: bool(client.chunks) or not body["stream"])
    api.llm.going.clear()
    assert api.llm.num_unfinished == client.admission.num_admitted == 1
    client.left.set()
    async with asyncio.timeout(0.5):
        await response
    assert api.llm.num_unfinished == client.admission.num_admitted == 0
    assert len(api.llm.core.aborted) == 1


async def heard_of_a_slow_model(api: Api, path: str, body: dict[str, Any]) -> str:
    """What a stream says whose model begins only once three pieces have been sent."""
    api.llm = FakeLLM()
    api.llm.going.clear()
    client = Client(api, path, body)
    response = client.start()
    await until(lambda: len(client.chunks) >= 3)
    api.llm.going.set()
    await response
    return b"".join(client.chunks).decode()
