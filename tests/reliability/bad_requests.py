"""Requests that no client should send, with the status that each gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPLETION = {"model": "llama", "prompt": [90, 91], "max_tokens": 2}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
MESSAGES = CHAT
BAD = (400,)


@dataclass(frozen=True)
class BadRequest:
    """A request, and the statuses that are right for it."""

    what: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = BAD
    method: str = "POST"
    content_type: str = "application/json"


HOSTILE_NUMBERS = ["0", "-1", "2147483648", "9223372036854775808", "1" + "0" * 400, "NaN", "Infinity", "1e999"]
NO_NUMBERS = ["true", '"1"', "[]", "{}", "[1]"]
# What is in range, so that the request is served.
GOOD = {
    "n": (),
    "max_tokens": (),
    "temperature": ("0", "2147483648", "9223372036854775808"),
    "top_p": (),
    "top_k": ("0", "-1"),
    "min_p": ("0",),
    "repetition_penalty": ("2147483648", "9223372036854775808"),
    "presence_penalty": ("0", "-1"),
    "frequency_penalty": ("0", "-1"),
    "seed": ("0", "2147483648"),
    "min_tokens": ("0",),
    "logprobs": ("0",),
    "prompt_logprobs": ("0",),
    "priority": ("0", "-1"),
}


def with_raw(base: dict[str, Any], field: str, raw: str) -> bytes:
    """A body with a field's value as it is written, be it JSON or not."""
    kept = {key: value for key, value in base.items() if key != field}
    return (json.dumps(kept)[:-1] + f', "{field}": {raw}}}').encode()


def numbers() -> Iterator[BadRequest]:
    for field, good in GOOD.items():
        for raw in [*HOSTILE_NUMBERS, *NO_NUMBERS]:
            if raw not in good:
                yield BadRequest(f"{field}={raw[:24]}", "/v1/completions", with_raw(COMPLETION, field, raw))


def fields() -> Iterator[BadRequest]:
    wrong: list[tuple[str, Any]] = [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [512]),
        ("prompt", [-1]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", {"a": 1}),
        ("prompt", [5] * 600),
        ("prompt", ["a"] * 5000),
        ("prompt", "\ud800"),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", ["a" * 2000]),
        ("stop", 5),
        ("stop", [None]),
        ("stop_token_ids", [512]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("bad_words", [""]),
        ("bad_words", "a"),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("echo", "yes"),
        ("suffix", "x"),
        ("best_of", 3),
        ("unknown_field", 1),
        ("Temperature", 1),
        ("model", 5),
        ("ignore_eos", "no"),
        ("cache_salt", 5),
        ("chat_template", "{{ 1 }}"),
    ]
    for field, value in wrong:
        yield BadRequest(
            f"{field}={str(value)[:24]!r}", "/v1/completions", json.dumps(COMPLETION | {field: value}).encode()
        )
    yield BadRequest(
        "another model", "/v1/completions", json.dumps(COMPLETION | {"model": "gpt-9"}).encode(), statuses=(404,)
    )


def chats() -> Iterator[BadRequest]:
    wrong: list[tuple[str, Any]] = [
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", [{}]),
        ("messages", ["hi"]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": "emperor", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}]),
        ("messages", [{"role": "user", "content": "a"}] * 2049),
        ("messages", [{"role": "user", "content": "\udfff"}]),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", [1]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True}}}),
        ("structured_outputs", {"regex": "(a"}),
        ("guided_grammar", "root ::= ("),
        ("top_logprobs", 5),
        ("top_logprobs", 21),
        ("logprobs", 5),
        ("modalities", ["audio"]),
        ("max_completion_tokens", 0),
        ("n", 129),
        ("prompt", "hi"),
    ]
    for field, value in wrong:
        yield BadRequest(
            f"chat {field}={str(value)[:24]!r}", "/v1/chat/completions", json.dumps(CHAT | {field: value}).encode()
        )


def messages() -> Iterator[BadRequest]:
    deep: Any = "x"
    for _ in range(40):
        deep = {"a": deep}
    wrong: list[tuple[str, Any]] = [
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "emperor", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {"url": "http://127.0.0.1"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}]),
        ("messages", [{"role": "user", "content": "a"}] * 2049),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}]),
        ("messages", [{"role": "user", "content": "\udfff"}]),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", None),
        ("max_tokens", "1"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", True),
        ("stop_sequences", ["a"] * 17),
        ("stop_sequences", [""]),
        ("system", [{"type": "image"}]),
        ("tools", [{"name": "f", "input_schema": {"type": "object"}}] * 129),
        ("tools", [{"name": "f" * 129, "input_schema": {"type": "object"}}]),
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("tool_choice", {"type": "maybe"}),
        ("thinking", {"type": "enabled", "budget_tokens": -1}),
        ("metadata", {"user_id": 5}),
        ("metadata", deep),
        ("unknown_field", 1),
    ]
    for field, value in wrong:
        yield BadRequest(
            f"messages {field}={str(value)[:24]!r}", "/v1/messages", json.dumps(MESSAGES | {field: value}).encode()
        )
    yield BadRequest("messages: no JSON", "/v1/messages", b"[" * 100_000)
    yield BadRequest("count nothing", "/v1/messages/count_tokens", b"{}")


def responses() -> Iterator[BadRequest]:
    wrong: list[tuple[str, Any]] = [
        ("input", None),
        ("input", []),
        ("input", 5),
        ("input", [5]),
        ("input", [{"role": "user"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1"}]}]),
        ("input", [{"type": "function_call", "call_id": "1"}]),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"role": "user", "content": "a"}] * 2049),
        ("input", "\udfff"),
        ("previous_response_id", "resp_1"),
        ("previous_response_id", "r" * 300),
        ("instructions", 5),
        ("max_output_tokens", 0),
        ("max_output_tokens", 2**63),
        ("temperature", True),
        ("top_p", 2),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "mcp", "server_url": "http://127.0.0.1"}]),
        ("tools", [{"type": "function", "name": "f"}] * 2),
        ("tools", [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("background", True),
        ("include", ["everything"]),
        ("unknown_field", 1),
    ]
    for field, value in wrong:
        body = {"model": "llama", "input": "Hi", "max_output_tokens": 2} | {field: value}
        yield BadRequest(f"responses {field}={str(value)[:24]!r}", "/v1/responses", json.dumps(body).encode())
    for method, path in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/responses/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
    ]:
        yield BadRequest(f"{method} {path}", path, b"", (404,), method=method)


def bodies() -> Iterator[BadRequest]:
    good = json.dumps(COMPLETION).encode()
    raw = {
        "nothing": b"",
        "a word": b"hello",
        "null": b"null",
        "a list": b"[]",
        "a number": b"5",
        "cut": good[:-4],
        "two": good + good,
        "trailing": good + b"x",
        "nul": b"\0" * 64,
        "latin-1": b'{"prompt": "\xe4"}',
        "utf-16": good.decode().encode("utf-16"),
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "closed deep lists": b'{"model": "llama", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        "a lone quote": b'"',
        "single quotes": b"{'model': 'llama'}",
        "comments": b'{"model": "llama" /* x */}',
    }
    for what, body in raw.items():
        yield BadRequest(f"body: {what}", "/v1/completions", body)
        yield BadRequest(f"tokenize body: {what}", "/tokenize", body)
    yield BadRequest("too large", "/v1/completions", b'{"prompt": "' + b"a" * (17 << 20) + b'"}', statuses=(413,))
    yield BadRequest("a form", "/v1/completions", b"a=b", (400, 415), content_type="application/x-www-form-urlencoded")


def routes() -> Iterator[BadRequest]:
    for method, path, status in [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/ready", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/none", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("POST", "//v1/completions", 404),
        ("PUT", "/metrics", 405),
    ]:
        yield BadRequest(f"{method} {path}", path, b"", (status,), method=method)
    for path, body in [
        ("/detokenize", {"model": "llama", "tokens": [512]}),
        ("/detokenize", {"model": "llama", "tokens": ["a"]}),
        ("/detokenize", {"model": "llama"}),
        ("/tokenize", {"model": "llama"}),
        ("/tokenize", {"model": "llama", "prompt": 5}),
    ]:
        yield BadRequest(f"{path} {body}", path, json.dumps(body).encode())


BAD_REQUESTS = [*numbers(), *fields(), *chats(), *messages(), *responses(), *bodies(), *routes()]
