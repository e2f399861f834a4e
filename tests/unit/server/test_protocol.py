from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from transfuse.server.http_server import HttpServer
from transfuse.server.limits import MAX_HEADER_BYTES
from transfuse.server.protocol import LimitedProtocol
from transfuse.server.serve import bind


class Impatient(LimitedProtocol):
    """The same within a test's time."""

    max_connections = 3
    head_timeout = 0.3
    write_timeout = 0.3


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers OK."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"OK"})


@contextlib.asynccontextmanager
async def served(application: Any = app) -> AsyncIterator[int]:
    """The port of a server."""
    server = HttpServer(application)
    server.config.http = Impatient
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield port
        finally:
            server.should_exit = True
            await task


async def talk(port: int, *pieces: bytes | float, seconds: float = 5) -> bytes:
    """All that the server says to the pieces, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            else:
                await asyncio.sleep(piece)
        async with asyncio.timeout(seconds):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def run(conversation: Callable[[int], Awaitable[Any]], application: Any = app) -> Any:
    async def main() -> Any:
        async with served(application) as port:
            return await conversation(port)

    return asyncio.run(main())


def check_error(answer: bytes, status: int) -> str:
    """The message of an error in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.lower()
    return str(json.loads(body)["error"]["message"])


def test_a_request_is_answered() -> None:
    answer = run(lambda port: talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert answer.endswith(b"\r\n\r\nOK")
    assert b"uvicorn" not in answer


@pytest.mark.parametrize(
    "request_",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1" + b"0" * 400 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA\0: b\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400(request_: bytes) -> None:
    assert "HTTP" in check_error(run(lambda port: talk(port, request_)), 400)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_head_without_end_is_431(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (MAX_HEADER_BYTES + 70_000)
    pieces = [head[:MAX_HEADER_BYTES], *(head[MAX_HEADER_BYTES + i :][:size] for i in range(0, size * 60, size))]
    assert str(MAX_HEADER_BYTES) in check_error(run(lambda port: talk(port, *pieces)), 431)


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"GET / HTTP/1.1\r\n"],
        [piece for char in b"GET / HTTP/1.1\r\nHost: x\r\nA: bcdefghij" for piece in (bytes([char]), 0.02)],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0.1, b"GET / HT"],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT"],
    ],
    ids=["silent", "stops", "dribbles", "second", "second, at once"],
)
def test_a_head_that_takes_too_long_ends_the_connection(pieces: list[bytes | float]) -> None:
    answer = run(lambda port: talk(port, *pieces, seconds=3))  # its end is what is waited for
    assert answer.count(b"HTTP/1.1") == (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" in b"".join(piece for piece in pieces if isinstance(piece, bytes))
    )


def test_an_idle_connection_has_more_time() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = run(
        lambda port: talk(port, request, Impatient.head_timeout * 2, request[:-2] + b"Connection: close\r\n\r\n")
    )
    assert answer.count(b"HTTP/1.1 200") == 2


def test_connections_above_the_limit_are_503() -> None:
    async def crowd(port: int) -> tuple[bytes, bytes]:
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(Impatient.max_connections)]
        await asyncio.sleep(0.05)
        refused = await talk(port)
        for _, writer in others:
            writer.close()
        await asyncio.sleep(0.05)
        return refused, await talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    refused, taken = run(crowd)
    assert "3 connections" in check_error(refused, 503)
    assert b"retry-after: 1" in refused
    assert taken.startswith(b"HTTP/1.1 200")


def test_garbage_within_a_response_writes_no_second_one() -> None:
    started = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def interrupt(port: int) -> bytes:
        return await talk(
            port, b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 0.1, b"garbage\r\n"
        )

    assert run(interrupt, slow).count(b"HTTP/1.1") == 1


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    gone = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        departure = asyncio.ensure_future(receive())
        while not departure.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        gone.append(departure.result()["type"])

    async def take_nothing(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            while not gone:
                await asyncio.sleep(0.02)
        writer.close()
        del reader

    run(take_nothing, endless)
    assert gone == ["http.disconnect"]
