"""Conversations laid out here against Transformers' own `apply_chat_template`."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.unit.text.chat_templates import DUMP, FAMILIES
from transfuse.errors import PromptError
from transfuse.text import chat_template
from transfuse.text.chat_template import ChatTemplates

HF = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", extra_special_tokens=["<x>"]
)
USER = {"role": "user", "content": " What's <b>up</b> & é? \n"}
SYSTEM = {"role": "system", "content": "You are brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNot much. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź", "days": 2}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "blue"}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather's <state>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": ["integer", "null"]},
                    "units": {"type": "array", "items": {"enum": ["C", "F"]}},
                    "most": {"maximum": 10**30, "minimum": -1.5e300},
                },
                "required": ["city"],
            },
        },
    }
]
TWO_TEXTS = {
    "role": "assistant",
    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}],
}
BLOCKS = {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": " a "}]}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "ends with an answer": [USER, ANSWER],
    "tools": [USER, CALL, RESULT, RESULT, ANSWER, USER],
    "reasoning": [USER, {**ANSWER, "reasoning": "Let me see.", "name": None}, USER, {**ANSWER, "thinking": "So"}],
    "blocks": [BLOCKS, ANSWER],
    "several texts": [BLOCKS, TWO_TEXTS],
    "wrong order": [ANSWER, SYSTEM],
    "no content": [{"role": "user"}, {}],
    "odd": [{"role": 7, "content": {"a": [1, None, True, 1.5, float("inf")]}, "thinking": None, "x": None}],
}
Options = dict[str, Any]
OPTIONS: list[Options] = [
    {},
    {"add_generation_prompt": True},
    {"tools": TOOLS, "add_generation_prompt": True},
    {"tools": []},
    {"documents": [{"title": "a", "text": "b"}], "enable_thinking": False, "extra": {"k": (1, 2)}},
    {"bos_token": "<other>", "add_generation_prompt": True, "reasoning_effort": "high"},
    {"continue_final_message": True},
    {"continue_final_message": "reasoning_content"},
    {"continue_final_message": True, "add_generation_prompt": True},
]


def outcome(render: Any) -> str | None:
    """The text, or None where it is refused."""
    try:
        return render()
    except Exception as error:
        if render.__name__ == "ours":
            assert isinstance(error, PromptError)
        return None


def check_same(sources: Any, messages: Any, options: Options) -> str | None:
    """Asserts that both lay a conversation out alike, or both refuse, and returns the text."""
    HF.chat_template = sources["default"] if set(sources) == {"default"} else sources

    def theirs() -> Any:
        return HF.apply_chat_template(messages, tokenize=False, **options)

    def ours() -> str:
        templates = ChatTemplates(sources, HF.special_tokens_map)
        return templates.render(messages, **{"add_generation_prompt": False, **options})

    expected = outcome(theirs)
    assert outcome(ours) == expected
    return expected


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    texts = [
        check_same({"default": FAMILIES[name]}, messages, options)
        for messages in CONVERSATIONS.values()
        for options in OPTIONS
    ]
    # A template that refuses everything would show nothing.
    assert len({text for text in texts if text}) >= 8


TEXT = st.text(st.sampled_from("ab <>&\n\t'\"{}%é🎉|"), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT | VALUE},
    optional={"reasoning": TEXT | st.none(), "thinking": VALUE, "reasoning_content": TEXT, "tool_calls": VALUE},
)


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    messages=st.lists(MESSAGE, max_size=4),
    generation=st.booleans(),
    continued=st.sampled_from([False, False, True, "content", "thinking", "reasoning", "name"]),
    extra=VALUE,
)
def test_any_conversation(name: str, messages: Any, generation: bool, continued: Any, extra: Any) -> None:
    options = {"add_generation_prompt": generation, "continue_final_message": continued, "extra": extra}
    check_same({"default": FAMILIES[name]}, messages, options)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"dump", "command-r", "smollm3", "gemma"}))
def test_a_continued_answer_stays_open(name: str) -> None:
    open_answer = {"role": "assistant", "content": "Once upon a"}
    text = check_same({"default": FAMILIES[name]}, [USER, open_answer], {"continue_final_message": True})

    if name == "mistral":  # it writes something of its own at the end
        return
    assert text is not None and text.endswith("Once upon a")


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


@dataclasses.dataclass
class Block:
    type: str
    data: Any


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": [Block("x", np.int64(3)), Colour.RED], "n": None}


def test_templates_see_plain_data_only() -> None:
    extra = {
        "enum": Colour.RED,
        "int": Size.BIG,
        "np": [np.bool_(False), np.float32(0.5), np.float64(0.25), np.str_("s"), np.zeros(2)],
        "class": Block,
        "bytes": b"x",
        "set": {1},
        "tuple": (Colour.RED,),
        Size.BIG: Block("t", {"deep": Dumped()}),
    }
    text = check_same({"default": DUMP}, [Dumped(), {"role": Colour.RED, "content": b"x"}], {"extra": extra})
    assert text is not None and "<ndarray>" in text


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = str(messages)
    ChatTemplates({"default": FAMILIES["gemma"]}, {"bos_token": ""}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert str(messages) == before


SOURCES = {"default": "d", "tool_use": "t", "rag": "r{{ messages[0].content }}"}


@pytest.mark.parametrize("sources", [SOURCES, {"default": "d"}, {"tool_use": "t", "rag": "r"}, {}])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
@pytest.mark.parametrize("chosen", [None, "rag", "x{{ bos_token }}"])
def test_choice(sources: Any, tools: Any, chosen: Any) -> None:
    check_same(sources, [USER], {"tools": tools, "chat_template": chosen})


@pytest.mark.parametrize(
    ("sources", "options", "messages", "match"),
    [
        ({}, {}, [USER], "no chat template.*--chat-template"),
        ({"rag": "r"}, {}, [USER], r"\['rag'\].*name one"),
        (SOURCES, {}, [], "no messages"),
        (SOURCES, {}, ["x"], "message 0 is a str"),
        (SOURCES, {}, 3, "refused.*TypeError"),
        (SOURCES, {"tools": ["x"]}, [USER], "tools holds a str"),
        (SOURCES, {"documents": [3]}, [USER], "documents holds a int"),
        (SOURCES, {"continue_final_message": True, "add_generation_prompt": True}, [USER], "only one of them"),
        (SOURCES, {"continue_final_message": "name"}, [USER], "has no 'name'"),
        (SOURCES, {"continue_final_message": True}, [USER], "does not read"),
        ({"default": "{{ messages[0].content[:3] }}"}, {"continue_final_message": True}, [USER], "cannot be continued"),
        ({"default": "{{ raise_exception('no') }}"}, {}, [USER], "refused.*TemplateError: no"),
        ({"default": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, {}, [USER], "refused.*RecursionError"),
        ({"default": "{{ range(10**9) | list }}"}, {}, [USER], "refused.*OverflowError"),
        ({"default": "{{ 'x' * 10**14 }}"}, {}, [USER], "refused.*MemoryError"),
        ({"default": "{{ 1 // 0 }}"}, {}, [USER], "refused.*ZeroDivisionError"),
        ({"default": "{% if %}"}, {}, [USER], "refused.*TemplateSyntaxError"),
        ({"default": "{% include 'x' %}"}, {}, [USER], "refused.*TypeError"),
        ({"default": "{{ ''.__class__.__mro__ }}"}, {}, [USER], "refused.*SecurityError"),
        ({"default": "{{ messages.append(1) }}"}, {}, [USER], "refused.*SecurityError"),
        ({"default": "{{ dict.__call__.__globals__ }}"}, {}, [USER], "refused.*SecurityError"),
        ({"default": "{{ namespace(__class__=1) }}"}, {}, [USER], "refused.*SecurityError"),
        ({"default": "{% set ns = namespace() %}{% set ns._x = 1 %}"}, {}, [USER], "refused.*SecurityError"),
    ],
)
def test_refusals(sources: Any, options: Options, messages: Any, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        ChatTemplates(sources, {}).render(messages, **{"add_generation_prompt": False, **options})


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplates({"default": "{{ raise_exception('x' * 10**6) }}"}, {}).render([USER])
    assert len(str(caught.value)) < 2000


def test_the_clock_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2031, 2, 3)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    assert ChatTemplates({"default": "{{ strftime_now('%d %b %Y') }}"}, {}).render([USER]) == "03 Feb 2031"


def test_compiled_templates_are_kept_up_to_a_limit() -> None:
    chat_template._compile.cache_clear()
    templates = ChatTemplates({"default": "x"}, {})
    for _ in range(3):
        templates.render([USER])
    assert chat_template._compile.cache_info().misses == 1
    for index in range(100):
        templates.render([USER], chat_template=f"{index} y")
    assert chat_template._compile.cache_info().currsize == 32


def test_the_front_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, transfuse.text.tokenizer, transfuse.text.bounded_templates, transfuse.front.front;"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
