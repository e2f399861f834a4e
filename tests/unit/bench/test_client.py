from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from transfuse.bench.client import Target, send, served_model
from transfuse.bench.requests import BenchRequest
from transfuse.bench.timing import Timing
from transfuse.errors import BenchmarkError

TARGET = Target("http://server", "m", "completions", None, True, timeout=5.0)
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}


class Parts(httpx2.AsyncByteStream):
    """A body that comes in these parts; an exception among them is raised."""

    def __init__(self, parts: list[bytes | Exception | float]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield part


def event(data: Any) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def text(written: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": written, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def ask(
    parts: list[bytes | Exception | float],
    *,
    status: int = 200,
    target: Target = TARGET,
    bodies: list[Any] | None = None,
) -> Timing:
    async def handle(request: httpx2.Request) -> httpx2.Response:
        if bodies is not None:
            bodies.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(status, stream=Parts(parts))

    async def run() -> Timing:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handle)) as client:
            return await send(client, target, BenchRequest([1, 2, 3, 4], 3))

    return asyncio.run(run())


def test_chunks_are_timed_and_tokens_counted_by_usage() -> None:
    bodies: list[Any] = []
    usage = USAGE | {"usage": USAGE["usage"] | {"prompt_tokens_details": {"cached_tokens": 2}}}
    parts = [event(text("a")), 0.02, event(text("b")) + event(text("c", "length")), event(usage), event("[DONE]")]
    timing = ask(parts, bodies=bodies)
    assert timing.error is None
    assert (timing.num_prompt_tokens, timing.num_output_tokens, timing.num_cached_tokens) == (4, 3, 2)
    assert len(timing.chunks) == 3
    assert timing.sent <= timing.chunks[0] < timing.chunks[1] <= timing.chunks[2] <= timing.ended
    path, body = bodies[0]
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 3, 4]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (3, True, 0, True)


def test_an_event_may_come_in_pieces() -> None:
    whole = event(text("a")) + event(USAGE) + event("[DONE]")
    timing = ask([whole[index : index + 5] for index in range(0, len(whole), 5)])
    assert (timing.error, len(timing.chunks)) == (None, 1)


def test_a_role_is_no_token_and_reasoning_is_one() -> None:
    target = Target("http://server", "m", "chat", None, False, timeout=5.0)
    bodies: list[Any] = []
    parts = [
        event(delta(role="assistant", content="")),
        event(delta(reasoning_content="hm")),
        event(delta(content="a")),
        event(delta("stop")),
        event(USAGE),
        event("[DONE]"),
    ]
    timing = ask(parts, target=target, bodies=bodies)
    assert (timing.error, len(timing.chunks)) == (None, 2)
    path, body = bodies[0]
    assert path == "/v1/chat/completions"
    assert "ignore_eos" not in body
    assert body["messages"][0]["role"] == "user"


def test_a_token_that_is_no_text_yet_counts_and_a_bare_end_does_not() -> None:
    timing = ask([event(text("")), event(text("ab")), event(text("", "length")), event(USAGE), event("[DONE]")])
    assert len(timing.chunks) == 2


def test_an_end_counts_where_it_is_all_there_is() -> None:
    timing = ask([event(text("", "length")), event(USAGE), event("[DONE]")])
    assert (timing.error, len(timing.chunks)) == (None, 1)


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ([b'{"error": {"message": "too many"}}'], 429, "HTTP 429"),
        ([event(text("a")), event({"error": {"message": "oops"}})], 200, "an error in the stream"),
        ([event(text("a")), event(USAGE)], 200, "the stream was cut off"),
        ([event(text("a")), event("[DONE]")], 200, "no usage in the stream, so that tokens cannot be counted"),
        ([event(USAGE), event("[DONE]")], 200, "an answer without tokens"),
        ([event("{")], 200, "a chunk that is no JSON of a completion"),
        ([event(text("a")), httpx2.ReadError("gone")], 200, "ReadError"),
        ([event(text("a")), 9.0], 200, "no end within 0.2 s"),
    ],
)
def test_failures_are_told_by_kind(parts: list[Any], status: int, error: str) -> None:
    target = Target("http://server", "m", "completions", None, True, timeout=0.2)
    timing = ask(parts, status=status, target=target)
    assert timing.error == error
    assert timing.ended > timing.sent


def test_what_the_server_said_of_a_failure_is_kept() -> None:
    assert "too many" in ask([b'{"error": {"message": "too many"}}'], status=429).detail


def test_a_server_that_is_not_there_is_one_error() -> None:
    with pytest.raises(BenchmarkError, match="Check --base-url"):
        served_model("http://127.0.0.1:1", None)
