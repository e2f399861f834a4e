"""Whatever a model writes: nothing raises, cuts do not matter, arguments are JSON, and text is not lost."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text.replies.templates import FAMILIES
from tests.unit.text.replies.test_families import TOOLS, USER, answers, check_order, read, said
from transfuse.text.replies import choose_format, tools_of
from transfuse.text.replies.formats import MarkedFormat
from transfuse.text.replies.harmony import HarmonyFormat

# What formats are made of, and what breaks them.
PIECES = [
    *('{"name": "weather", "arguments": {"city": "x"}}', '{"name": "weather", "parameters": {}}', "get_time()"),
    *('{"name": "', '"}', "}", "{", "[", "]", "(", ")", '"', "'", "\\", ",", ";", ":", "=", "\n", " ", "1", "-"),
    *("weather", "city", "function", "NaN", "1e999", "null", "\ud800", "\\ud800", "é😀", "\x00", "```json\n", "```"),
    *("<function=weather>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", '<invoke name="weather">', '<parameter name="city">', "</invoke>"),
    *(" to=functions.weather", "analysis", "commentary", "final", "assistant", "<", "<|", "</", "<think", "[TOOL"),
    *('weather(city="x")', "brave_search.call(query=1)", "functions.weather:0", "function"),
]


def markers_of(name: str) -> tuple[str, ...]:
    chosen = choose_format(FAMILIES[name].template)
    assert isinstance(chosen, MarkedFormat | HarmonyFormat)
    return chosen.markers


names = st.sampled_from(list(FAMILIES))


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    """Pieces of formats in any order, or what the family would say with something broken in it."""
    family = FAMILIES[name]
    markers = markers_of(name)
    if draw(st.booleans()):
        piece = st.sampled_from([*PIECES, *markers, *markers]) | st.text(max_size=3)
        return "".join(draw(st.lists(piece, max_size=20)))
    answer = draw(st.sampled_from(answers(name, family)))
    _, text = family.turn([USER], {"reasoning_content": "Hm.", **answer}, tools=TOOLS)
    start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    return text[:start] + draw(st.sampled_from(["", *PIECES, *markers])) + text[end if draw(st.booleans()) else start :]


@settings(max_examples=3000, deadline=None)
@given(data=st.data(), name=names, is_special=st.booleans(), tools=st.sampled_from([TOOLS, []]))
def test_nothing_raises_and_cuts_do_not_matter(data: st.DataObject, name: str, is_special: bool, tools: Any) -> None:
    text = data.draw(texts(name))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    family = FAMILIES[name]
    prompt = data.draw(st.sampled_from(["", family.render([USER], tools=TOOLS), "x<think>\n"]))
    family = family if is_special else type(family)(**{**vars(family), "special": ()})
    whole, events = read(family, prompt, [text], tools)
    check_order(events)
    for call in whole.calls:
        arguments = json.loads(call.arguments, parse_constant=lambda _: pytest.fail("not JSON"))
        assert isinstance(arguments, dict)
        call.arguments.encode() and call.name.encode() and call.id.encode()
    assert bool(tools) or not whole.calls
    for cut in (pieces, list(text)):
        assert said(read(family, prompt, cut, tools)[0]) == said(whole)
    # A marker that is cut in two by another is plain text, whatever it looks like without that.
    bare = re.sub("|".join(map(re.escape, family.special)) or "(?!)", "", text)
    if not any(marker in bare for marker in family.special):
        assert not any(marker in whole.content + whole.reasoning for marker in family.special)


@settings(max_examples=200, deadline=None)
@given(name=names, text=st.text(alphabet="ab {}[]().,\n\t<>|/é`", max_size=60), tools=st.sampled_from([TOOLS, []]))
def test_plain_text_is_left_as_it_is(name: str, text: str, tools: Any) -> None:
    reply, _ = read(FAMILIES[name], "", list(text), tools)
    if "gpt-oss" in name:  # text without a header: what comes before it is none
        assert reply.content == text.lstrip() or not text.strip() or text.lstrip().startswith("<|")
    else:
        assert reply.content == text
    assert (reply.reasoning, reply.calls) == ("", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_time_is_linear(name: str) -> None:
    """Twenty times the text takes about twenty times as long, whatever begins and never ends."""
    family = FAMILIES[name]
    chosen = choose_format(family.template)
    random.seed(0)
    openers = [*markers_of(name), *PIECES]
    runs = [opener * 400 for opener in openers] + ["".join(random.choices(openers, k=300))]
    for run in runs:
        times = []
        for factor in (1, 20):
            parser = chosen.parser("", tools_of(TOOLS), family.special)
            text = run[:400] * factor
            start = time.process_time()
            for index in range(0, len(text), 4):
                parser.feed(text[index : index + 4])
            parser.finish()
            times.append(time.process_time() - start)
        assert times[1] < 100 * times[0] + 0.02, (run[:50], times)


N = 100_000
# Regions of calls whose readers look for what never comes.
ENDLESS = {
    "granite": "<|tool_call|>" + " " * N + "x",
    "qwen3-coder": "<tool_call>" + "<function=" * (N // 10) + "</tool_call>",
    "seed": "<seed:tool_call>" + "<function=" * (N // 10) + "</seed:tool_call>",
    "deepseek-v3": "<｜tool▁call▁begin｜>x<｜tool▁sep｜>" + "x```json{" * (N // 9) + "}<｜tool▁call▁end｜>",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_is_linear_where_all_comes_at_once(name: str) -> None:
    text, start = ENDLESS[name], time.process_time()
    reply, _ = read(FAMILIES[name], "", [text])
    assert time.process_time() - start < 1
    assert not reply.calls and len(reply.content) >= N // 2
