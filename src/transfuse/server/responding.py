"""Sends an answer whole, or as events while it grows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.responses import Response

from transfuse.server.generation import Generation
from transfuse.server.streams import EventStream, unless_gone


async def respond(
    generation: Generation,
    complete: Callable[[], Coroutine[Any, Any, str]],
    events: Callable[[], AsyncGenerator[str, None]],
) -> Response:
    """The HTTP response; it starts when the answer does, so that what fails before has its own status.

    Args:
        generation: what grows.
        complete: makes the whole answer as JSON, for those who want no stream.
        events: makes the server-sent events.

    Raises:
        ClientDisconnect: the client has left; the answer was aborted.
    """
    request = generation.request
    if not generation.stream:
        return Response(await unless_gone(request, complete()), media_type="application/json")
    source = events()
    return EventStream(await unless_gone(request, anext(source)), source)
