"""Drives an ASGI application without a network, and stands in for what is behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from transfuse.messages import CoreStats


@dataclass
class Reply:
    """What an application answered; no status where it answered nothing."""

    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False

    def header(self, name: str) -> str | None:
        """A header's value."""
        return next((value.decode() for key, value in self.headers if key == name.encode()), None)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape to the letter."""
        (name,) = content = json.loads(self.body)
        assert name == "error"
        assert set(content["error"]) == {"message", "type", "param", "code"}
        return dict(content["error"])


async def call(
    app: Callable[..., Awaitable[None]],
    method: str = "GET",
    path: str = "/",
    *,
    headers: Sequence[tuple[str, str]] = (),
    chunks: Sequence[bytes | float] = (b"",),
    leaves: bool = False,
) -> Reply:
    """One request.

    Args:
        app: whom to ask.
        method: of the request.
        path: as it stands in the request line.
        headers: of the request.
        chunks: pieces of its body; a number is a pause of so many seconds.
        leaves: whether the client is gone after the last chunk, without having sent all.
    """
    reply = Reply()
    pending = list(chunks)

    async def receive() -> dict[str, Any]:
        while pending:
            if isinstance(chunk := pending.pop(0), bytes):
                return {"type": "http.request", "body": chunk, "more_body": bool(pending) or leaves}
            await asyncio.sleep(chunk)
        if not leaves and not reply.ended:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], list(message["headers"])
        else:
            reply.body += message.get("body", b"")
            reply.ended = not message.get("more_body", False)

    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path.partition("?")[0]),
        "raw_path": path.partition("?")[0].encode(),
        "query_string": path.partition("?")[2].encode(),
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "root_path": "",
        "state": {},
    }
    await app(scope, receive, send)
    return reply


class Inner:
    """An application that takes in the whole body and says OK; it remembers what it was given."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers."""
        self.scopes.append(scope)
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"OK"})


@dataclass
class IdleLLM:
    """What of an `AsyncLLM` the server looks at while it generates nothing."""

    state: str = "ready"
    reason: str = ""
    stats: CoreStats = field(default_factory=CoreStats)
    num_restarts: int = 0
