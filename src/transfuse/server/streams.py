"""Reads several growing answers at once, and stops when the client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncGenerator[T, None]], pause: float | None = None
) -> AsyncGenerator[tuple[int, T] | None, None]:
    """What each stream came to last, with the stream's index, whenever one has gone on.

    A slow reader misses what was replaced meanwhile. The first error of a stream ends all of them; so does closing this
    generator, which may be read by one task after another.

    Args:
        streams: what is read.
        pause: seconds after which None is yielded where no stream has gone on; None: never.
    """
    latest: dict[int, T] = {}
    errors: list[Exception] = []
    running = set(range(len(streams)))
    woken = asyncio.Event()

    async def pump(index: int) -> None:
        try:
            async with aclosing(streams[index]) as stream:
                async for item in stream:
                    latest[index] = item
                    woken.set()
        except Exception as error:
            errors.append(error)
        finally:
            running.discard(index)
            woken.set()

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        while running or latest:
            try:
                async with asyncio.timeout(pause):
                    await woken.wait()
            except TimeoutError:
                yield None
                continue
            woken.clear()
            ready = list(latest.items())
            latest.clear()
            for each in ready:
                yield each
            if errors:
                raise errors[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client leaves.

    Raises:
        ClientDisconnect: the client has left.
    """
    task = asyncio.ensure_future(work)
    departure = asyncio.ensure_future(_departure(request.receive))
    try:
        await asyncio.wait((task, departure), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        departure.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        departure.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: str) -> str:
    """A server-sent event with a name.

    Args:
        name: of the event.
        data: JSON on one line.
    """
    return f"event: {name}\ndata: {data}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events; however the response ends, their source is closed.

    Args:
        first: the events that are there when the response starts.
        rest: those that follow.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        async def chain() -> AsyncGenerator[str, None]:
            yield first
            async for events in rest:
                yield events

        # Proxies that collect a response before they pass it on would undo the stream.
        super().__init__(chain(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()
