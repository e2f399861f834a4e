from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.server.asgi import Inner, Reply, call
from transfuse.server.limits import LimitsMiddleware
from transfuse.server.settings import ServerSettings

JSON = ("Content-Type", "application/json")
LIMIT = 4096


def ask(*chunks: bytes | float, headers: list[tuple[str, str]] | None = None, **more: Any) -> tuple[Reply, Inner]:
    inner = Inner()
    settings = ServerSettings(served_model_names=("m",), max_body_bytes=LIMIT, body_timeout=0.2)
    app = LimitsMiddleware(inner, settings)
    method = more.pop("method", "POST")
    headers = [JSON] if headers is None else headers
    return asyncio.run(call(app, method, "/v1/x", headers=headers, chunks=chunks, **more)), inner


def test_a_body_in_pieces_arrives_whole() -> None:
    body = json.dumps({"text": 'é"\\[{NaN' * 20, "n": [1.5e3, -2, None]}, ensure_ascii=False).encode()
    for size in (1, 2, 3, 7, 1000):
        reply, inner = ask(*(body[i : i + size] for i in range(0, len(body), size)))
        assert reply.status == 200
        assert inner.bodies == [body]


def test_a_request_without_body_is_handed_on() -> None:
    reply, inner = ask(method="GET", headers=[])
    assert (reply.status, inner.bodies) == (200, [b""])


@pytest.mark.parametrize("sizes", [[LIMIT + 1], [LIMIT, 1], [1000] * 5])
def test_a_body_above_the_limit_is_413(sizes: list[int]) -> None:
    reply, inner = ask(*(b" " * size for size in sizes))
    assert reply.status == 413
    assert str(LIMIT) in reply.error["message"] and "--max-body-bytes" in reply.error["message"]
    assert reply.header("connection") == "close"
    assert not inner.scopes


def test_a_body_of_the_limit_is_taken() -> None:
    assert ask(b" " * LIMIT)[0].status == 200


def test_a_length_above_the_limit_is_refused_before_the_body() -> None:
    headers = [JSON, ("Content-Length", "10000000000"), ("Expect", "100-continue")]
    reply, _ = ask(60.0, headers=headers)  # the client sends nothing for a minute
    assert reply.status == 413


@pytest.mark.parametrize("chunks", [(b"[", 60.0, b"]"), (b"[", *[0.03, b" "] * 100, b"]")], ids=["stops", "dribbles"])
def test_a_slow_body_is_408(monkeypatch: pytest.MonkeyPatch, chunks: tuple[bytes | float, ...]) -> None:
    monkeypatch.setattr("transfuse.server.refusal._MAX_DISCARD_SECONDS", 0.05)
    reply, inner = ask(*chunks)
    assert reply.status == 408
    assert not inner.scopes


def test_a_client_that_leaves_while_sending_gets_no_answer() -> None:
    reply, inner = ask(b"[1,", leaves=True)
    assert reply.status is None
    assert not inner.scopes


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 100_000, "64 levels"),
        (b'{"a":' * 65, "64 levels"),
        (b'["]",' * 65, "64 levels"),
        (b"[" * 65 + b"]" * 65, "64 levels"),
        (b'{"temperature": NaN}', "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-Infinity]", "Infinity"),
        (b'["\\\\", NaN]', "NaN"),
        (b'["\xff"]', "UTF-8"),
        (b'["\xc3', "UTF-8"),
        (b'["\xed\xa0\x80"]', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "zero byte"),
        ('{"a": 1}'.encode("utf-32-le"), "zero byte"),
        (b'["a\0b"]', "zero byte"),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 4096])
def test_bodies_that_no_parser_should_see_are_400(body: bytes, says: str, size: int) -> None:
    body = body[: LIMIT + 1] if len(body) <= LIMIT else body[:LIMIT]
    reply, inner = ask(*(body[i : i + size] for i in range(0, len(body), size)))
    assert reply.status == 400
    assert says in reply.error["message"]
    assert not inner.scopes


@pytest.mark.parametrize(
    "body", [b"[" * 64 + b"]" * 64, b"[[]," * 1000, b'"' + b"[" * 1000 + b'"', b'["NaN"]', b"No JSON", b"", b"1E5"]
)
def test_what_a_parser_can_be_given_is_handed_on(body: bytes) -> None:
    if body.startswith(b"[[],"):
        body = b"[" + b"[]," * 1000
    assert ask(body)[0].status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Content-Type", "text/plain")],
        [("Content-Type", "application/x-www-form-urlencoded")],
        [("Content-Type", "application/json; charset=utf-16")],
        [("Content-Type", "application/jsonx")],
        [JSON, ("Content-Encoding", "gzip")],
    ],
)
def test_other_types_are_415(headers: list[tuple[str, str]]) -> None:
    reply, inner = ask(b"{}", headers=headers)
    assert reply.status == 415
    assert not inner.scopes


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_json_in_utf8_is_taken(kind: str) -> None:
    assert ask(b"{}", headers=[("Content-Type", kind)])[0].status == 200


@pytest.mark.parametrize("headers", [[("a", "b")] * 101, [("a", "b" * 17_000)], [("a" * 17_000, "b")]])
def test_too_many_headers_are_431(headers: list[tuple[str, str]]) -> None:
    reply, inner = ask(b"{}", headers=headers)
    assert reply.status == 431
    assert not inner.scopes


def test_the_rest_of_a_refused_body_is_taken_in() -> None:
    """Else the connection is reset under the client's hands, and it may not see the answer."""
    taken = []

    class Counted(bytes):
        pass

    inner = Inner()
    settings = ServerSettings(served_model_names=("m",), max_body_bytes=LIMIT)

    async def ask_counting() -> Reply:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def counting() -> Any:
                message = await receive()
                taken.append(len(message.get("body", b"")))
                return message

            await LimitsMiddleware(inner, settings)(scope, counting, send)

        return await call(app, "POST", "/", headers=[JSON], chunks=[b" " * 3000] * 10)

    assert asyncio.run(ask_counting()).status == 413
    assert sum(taken) == 30_000
