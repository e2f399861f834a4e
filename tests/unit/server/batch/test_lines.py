from __future__ import annotations

import json
from typing import Any

import pytest

from transfuse.server.batch.lines import LineError, answer_line, custom_id_of, error_line, read_line

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é", "n": 1}}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_body_is_passed_on_as_it_stands() -> None:
    data = b'{"url": "/v1/messages", "body": { "a" :  [1e0, "\\u00e9"]}, "custom_id": "x", "method": "POST"}'
    found = read_line(data)
    assert (found.custom_id, found.url) == ("x", "/v1/messages")
    assert bytes(found.body) == b'{ "a" :  [1e0, "\\u00e9"]}'


@pytest.mark.parametrize(
    ("data", "code", "custom_id", "says"),
    [
        (b"", "invalid_line", None, "custom_id, method, url and body"),
        (b"[]", "invalid_line", None, "Expected `object`"),
        (b'{"custom_id": "a"', "invalid_line", None, "truncated"),
        (b'"\xff"', "invalid_line", None, "line is no request"),
        (b"[" * 100_000, "invalid_line", None, "line is no request"),
        (line(custom_id=7), "invalid_line", None, "custom_id"),
        (line(body="text"), "invalid_line", "a", "Expected `object`"),
        (line(more=1), "invalid_line", "a", "more"),
        (json.dumps({"custom_id": "b", "body": {}}).encode(), "invalid_line", "b", "method"),
        (line(method="GET"), "invalid_method", "a", "'POST'"),
        (line(url="http://h/v1/completions"), "invalid_url", "a", "/v1/chat/completions"),
        (line(url="x" * 5000), "invalid_url", "a", "xxx..."),
        (line(body={"stream": True}), "invalid_stream", "a", "leave stream out"),
    ],
)
def test_what_is_no_request_is_named(data: bytes, code: str, custom_id: str | None, says: str) -> None:
    with pytest.raises(LineError) as found:
        read_line(data)
    assert (found.value.code, found.value.custom_id) == (code, custom_id)
    assert says in str(found.value) and len(str(found.value)) < 1000
    written = error_line(found.value)
    assert written.endswith(b"\n") and written.count(b"\n") == 1
    answer = json.loads(written)
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": str(found.value)},
    }


def test_an_answer_in_the_format_of_the_api() -> None:
    answer = json.loads(answer_line("a\n", 400, "r", b'{"error": {"code": null}}'))
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {
        "custom_id": "a\n",
        "response": {"status_code": 400, "request_id": "r", "body": {"error": {"code": None}}},
        "error": None,
    }
    assert custom_id_of(answer_line("a\n", 200, "r", b"{}")) == "a\n"
