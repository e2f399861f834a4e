"""Response templates that tokenizers declare, beside Transformers' own `parse_response`."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from tests.unit.text.replies.test_families import TOOLS, check_order, cuts, said
from transfuse.text.replies import Event, Reply, choose_format, tools_of
from transfuse.text.replies.formats import DeclaredFormat, MarkedFormat

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|end\|>|<\|eot\|>)"},
    },
}
TAG_CALLS: dict[str, Any] = {
    "start_anchor_pattern": r"<\|(?:assistant|model)\|>",
    "fields": {
        "reasoning_content": {"open": ["<a>", "<a>>"], "close": "</a>", "content_args": {"strip": False}},
        "tool_calls": {
            "open_pattern": r"\s*<call=(?P<name>\w+)>",
            "close_pattern": r"</call>(?=\s|$)",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)=(?P<value>.*?)/>"},
            "transform": FUNCTION,
        },
        "content": {},
    },
}
LAX_CALLS: dict[str, Any] = {
    "start_anchor": ["<|model|>", "<|result|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|call>call:(?P<name>\w+)",
            "close": "<call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
            "transform": FUNCTION,
        },
        "notes": {"open": "<n>", "close": "</n>", "content": "kv-lines"},
        "content": {"close": ["<end>"]},
    },
}
PYTHON_CALLS: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<|calls>",
            "close": "<calls|>",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
TEMPLATES = {"json": JSON_CALLS, "tags": TAG_CALLS, "lax": LAX_CALLS, "python": PYTHON_CALLS}
TEXTS = {
    "json": [
        "<think>\nHm.\n</think>\n\nHi <b>. <|end|>",
        'Look.\n<call>{"name": "weather", "arguments": {"city": "x"}}</call>\n<call>{"name": "get_time", "arguments": '
        "{}}</call><|end|>",
    ],
    "tags": [
        "<a> Hm. </a>Hi.",
        "<call=weather><city=a b/><days=3/><wind=true/><units=[1]/></call>\n<call=get_time></call>",
    ],
    "lax": [
        "<|channel>thought\nHm.<channel|>Hi.<end>",
        '<|call>call:weather{city:<q>a "b", c:1<q>,days:3,wind:{"x:y":[1,{z:null}]}}<call|><n>a: 1\nb:2</n>',
    ],
    "python": ["Hi.", "<|calls>[weather(city='x', days=3), get_time()]<calls|>"],
}


def read(name: str, pieces: list[str], prompt: str = "", tools: Any = TOOLS) -> tuple[Reply, list[Event]]:
    chosen = choose_format("", declared=json.dumps(TEMPLATES[name]))
    assert isinstance(chosen, DeclaredFormat)
    parser = chosen.parser(prompt, tools_of(tools))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    check_order(events)
    reply = Reply()
    reply.add(events)
    return reply, events


def theirs(name: str, text: str, prompt: str = "") -> tuple[str, str, list[tuple[str, Any]]]:
    message = parse_response(text, TEMPLATES[name], prefix=prompt, tools=TOOLS)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return reasoning, message.get("content", ""), calls


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_it_says_what_transformers_reads_wherever_it_is_cut(name: str, text: str) -> None:
    expected = theirs(name, text)
    assert expected[2] or "Hi" in expected[1]
    for pieces in cuts(text):
        assert said(read(name, pieces)[0]) == expected, pieces


def test_the_prompt_may_have_begun_the_reply() -> None:
    prompt = "<|user|>x<|assistant|>old<|user|>y<|assistant|><think>\n"
    text = "Hm.</think>Hi."
    assert said(read("json", [text], prompt)[0]) == theirs("json", text, prompt) == ("Hm.", "Hi.", [])
    assert said(read("json", ["Hi."], "no anchor <think>")[0]) == ("", "Hi.", [])


PIECES = [
    *("<think>", "</think>", "<call>", "</call>", '{"name": "weather", "arguments": {}}', "<|end|>", " ", "\n", "x"),
    *("<a>", "</a>", ">", "<call=weather>", "<city=1/>", "</call>", "<|call>call:weather", "{a:<q>b<q>}", "<call|>"),
    *("<|channel>thought\n", "<channel|>", "<n>", "a:1\n", "</n>", "<end>", "<|calls>", "[weather()]", "<calls|>", "{"),
]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(TEMPLATES)), tools=st.sampled_from([TOOLS, []]))
def test_nothing_raises_and_cuts_do_not_matter(data: st.DataObject, name: str, tools: Any) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12)))
    whole, _ = read(name, [text], tools=tools)
    assert said(read(name, list(text), tools=tools)[0]) == said(whole)
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert tools or not whole.calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", "<call>{no</call>"),
        ("json", '<call>{"name": "weather", "arguments": {}}'[:-3]),
        ("json", "<call>[]</call>"),
        ("lax", "<|call>call:weather{city:}<call|>"),
        ("python", "<|calls>[open('x')]<calls|>"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert said(read(name, [text])[0]) == ("", text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '<call>{"a": "' + '\\"' * 50_000 + "</call>"),
        ("lax", "<|call>call:weather{a:<q>" + '"\\' * 50_000 + "<call|>"),
    ],
)
def test_a_text_that_never_ends_takes_no_time(name: str, text: str) -> None:
    start = time.process_time()
    assert said(read(name, [text])[0]) == ("", text, [])
    assert time.process_time() - start < 1


def test_without_tools_a_call_is_text() -> None:
    text = '<call>{"name": "weather", "arguments": {}}</call>'
    assert said(read("json", [text], tools=[])[0]) == ("", text, [])


def test_a_pattern_that_takes_too_long_leaves_text() -> None:
    spec = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": {"open_pattern": "(a|a|aa)+b", "close": "c"}}}
    parser = choose_format("", declared=json.dumps(spec)).parser("", tools_of(TOOLS))
    reply, start = Reply(), time.monotonic()
    for _ in range(20):
        reply.add(parser.feed("a" * 30))
    reply.add(parser.feed("c") + parser.finish())
    assert reply.content == "a" * 600 + "c"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "spec",
    [
        [],
        {},
        {"version": 2, "start_anchor": "x", "fields": {"content": {}}},
        {"fields": {"content": {}}},
        {"start_anchor": "x", "fields": {"content": {}, "other": {}}},
        {"start_anchor": "x", "fields": {"content": {"content": "yaml"}}},
        {"start_anchor": "x", "fields": {"content": {"close_pattern": "("}}},
        {"start_anchor": "x", "fields": {"content": {"close": []}}},
        {"start_anchor": 5, "fields": {"content": {}}},
        {"start_anchor": "x", "fields": {"content": {"surprise": 1}}},
    ],
)
def test_a_template_that_cannot_be_read_is_told_and_left_alone(spec: Any, caplog: pytest.LogCaptureFixture) -> None:
    choose_format.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_format("<tool_call>", declared=json.dumps(spec)), MarkedFormat)
    assert "response_template" in caplog.text
    assert isinstance(choose_format("<tool_call>", "hermes", declared=json.dumps(JSON_CALLS)), MarkedFormat)


def test_special_tokens_that_it_names_are_shown_to_the_reader_alone() -> None:
    chosen = choose_format("", declared=json.dumps(LAX_CALLS))
    special = {"<|call>", "<call|>", "<|model|>", "<s>", "<channel|>"}
    shown = chosen.shown(special)
    assert shown == {"<|call>", "<call|>", "<|model|>", "<channel|>"}
    reply = Reply()
    parser = chosen.parser("", tools_of(TOOLS), shown)
    for piece in ("a<cha", "nnel|>b", "<|call>call:weather", "{no<call|>"):
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    assert reply.content == "abcall:weather{no"


def test_forced_calls_are_json_behind_the_declared_reasoning() -> None:
    held = choose_format("", declared=json.dumps(JSON_CALLS)).held()
    assert isinstance(held, MarkedFormat) and held.thinking is not None
    assert (held.thinking.opener, held.thinking.closer) == ("<think>", "</think>")
