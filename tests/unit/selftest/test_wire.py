"""What a server that cannot be read comes to, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from transfuse.errors import SelftestError
from transfuse.selftest.expect import Difference
from transfuse.selftest.wire import Server, connect


class Said:
    """What the server says to everything."""

    status, kind, body = 200, "application/json", b"{}"


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def url(said: Said) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(said.status)
            self.send_header("content-type", said.kind)
            self.end_headers()
            self.wfile.write(said.body)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def read(url: str) -> list[Any]:
    return [(event.name, event.data) for event in Server(url, "m").stream("/", {"stream": True})]


def test_events_are_read_as_the_standard_has_them(url: str, said: Said) -> None:
    said.kind = "text/event-stream; charset=utf-8"
    said.body = b': hi\n\nevent: a\r\ndata: {"x":\r\ndata: 1}\r\n\r\ndata:[2]\n\ndata: [DONE]\n\n'
    assert read(url) == [("a", {"x": 1}), ("", [2]), ("", "[DONE]")]


@pytest.mark.parametrize(
    ("kind", "body", "difference"),
    [
        ("text/event-stream", b"data: {]\n\n", "no JSON"),
        ("text/event-stream", b"data: {}\n\ndata: {", "ends within an event"),
        ("application/json", b"{}", 'this is "application/json"'),
    ],
)
def test_a_stream_that_is_none_is_told(url: str, said: Said, kind: str, body: bytes, difference: str) -> None:
    said.kind, said.body = kind, body
    with pytest.raises(Difference, match=difference):
        read(url)


def test_a_refusal_is_told_with_what_was_sent(url: str, said: Said) -> None:
    said.status, said.body = 418, b"I am a teapot"
    server = Server(url, "m")
    with pytest.raises(Difference, match=r"status 418 instead of 200.*teapot"):
        server.stream("/v1/x", {"model": "m", "input": "x" * 99, "tools": [{"name": "y" * 99}]})
    assert server.sent.line == 'POST /v1/x {model: "m", input: ..., tools: [1]}'


def test_nobody_there_is_told(url: str) -> None:
    with pytest.raises(Difference, match="the connection broke"):
        Server("http://127.0.0.1:9", "m").ask("GET", "/")
    with pytest.raises(SelftestError, match="does not answer"):
        connect("http://127.0.0.1:9", None, None, 1.0)


def test_the_model_is_the_first_that_is_listed(url: str, said: Said) -> None:
    said.body = b'{"data": [{"id": "a", "max_model_len": 512}, {"id": "b"}]}'
    found = connect(url, None, None, 1.0)
    assert (found.model, found.max_model_len) == ("a", 512)
    assert connect(url, "b", None, 1.0).max_model_len is None
    said.body = b'{"data": []}'
    with pytest.raises(SelftestError, match="lists no model"):
        connect(url, None, None, 1.0)
    said.status = 401
    with pytest.raises(SelftestError, match="--api-key"):
        connect(url, None, None, 1.0)
    assert connect(url, "c", None, 1.0).model == "c", "a server need not list what it serves"
