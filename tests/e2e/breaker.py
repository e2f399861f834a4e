"""Stands around the application and breaks its answers, as other servers do by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# From a request's path and a part of an answer, a whole event or a whole body, to what is sent instead.
Edit = Callable[[str, str], str]


class Breaker:
    """An application whose answers are edited on their way out.

    Attributes:
        edit: what is done to them; None leaves them as they are.
    """

    def __init__(self) -> None:
        self.edit: Edit | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with this around it."""

        async def edited(scope: Scope, receive: Receive, send: Send) -> None:
            edit = self.edit
            if scope["type"] != "http" or edit is None:
                await app(scope, receive, send)
                return

            async def send_edited(message: Message) -> None:
                await send(_edited(message, lambda part: edit(scope["path"], part)))

            await app(scope, receive, send_edited)

        return edited


def _edited(message: Message, edit: Callable[[str], str]) -> dict[str, Any]:
    if message["type"] == "http.response.start":
        headers = [header for header in message["headers"] if header[0] != b"content-length"]
        return {**message, "headers": headers}
    text = message.get("body", b"").decode()
    # The server sends whole events.
    parts = [part + "\n\n" for part in text.split("\n\n")[:-1]] if text.endswith("\n\n") else [text]
    return {**message, "body": "".join(map(edit, parts)).encode()}
