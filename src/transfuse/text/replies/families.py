"""The ways in which families of models write calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Final

from transfuse.text.replies.calls import MAX_NAME, Call, NoCallError, call_of, calls_of, read_json, typed
from transfuse.text.replies.python_calls import python_calls
from transfuse.text.replies.scanners import (
    ByBracket,
    Named,
    UntilMarker,
    first_object_scanner,
    json_call_scanner,
    python_call_scanner,
    python_scanner,
)
from transfuse.text.replies.syntax import CallFrame, CallSyntax
from transfuse.text.replies.tools import Tools, numbered_id, short_id


def _read_first(region: str, tools: Tools) -> list[Call]:
    """An object, which may be the first of a list: so a call is told before the list has ended."""
    return calls_of(read_json(region.lstrip().removeprefix("[")))


def _read_json(region: str, tools: Tools) -> list[Call]:
    return calls_of(read_json(region))


def _read_python(region: str, tools: Tools) -> list[Call]:
    return python_calls(region)


def _json_frame(key: str = "arguments", **more: str) -> CallFrame:
    """A JSON object with the name, and the arguments under a key."""
    start, end = more.pop("start", ""), more.pop("end", "")

    def before(name: str) -> str:
        return f'{start}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '

    return CallFrame(before, f"}}{end}", **more)


def _marked_json(openers: tuple[str, ...], closers: tuple[str, ...] = ()) -> CallSyntax:
    """A JSON object with a name and arguments, or a list of such, behind a marker."""
    frame = _json_frame(first=f"{openers[0]}[", last="".join(("]", *closers[:1])), between=", ")
    return CallSyntax(
        read=_read_first,
        scanner=first_object_scanner,
        openers=openers,
        closers=("]", *closers),
        goes_on="{",
        frame=frame,
    )


@dataclass(frozen=True, slots=True)
class _Tags:
    """A call with a tag for each argument.

    Attributes:
        call: matches its start; its group is the name.
        end: its end.
        argument: matches an argument's start; its group is the name.
        argument_end: an argument's end.
    """

    call: re.Pattern[str]
    end: str
    argument: re.Pattern[str]
    argument_end: str

    def read(self, region: str, tools: Tools) -> list[Call]:
        """The calls in a region; what ends is whole."""
        calls: list[Call] = []
        position = 0
        while (start := self.call.search(region, position)) is not None:
            name = start[1].strip()
            position, arguments = start.end(), {}
            while (argument := self.argument.match(region, position)) is not None:
                end = self._end_of_argument(region, argument.end())
                text = _without_edges(region[argument.end() : end])
                arguments[argument[1].strip()] = typed(text, tools.schema_of(name, argument[1].strip()))
                position = end + len(self.argument_end)
            if not region[position : position + _TAG_WINDOW].lstrip().startswith(self.end):
                raise NoCallError("a call without its end")
            calls.append(call_of(name, arguments))
        if not calls:
            raise NoCallError("no call")
        return calls

    def _end_of_argument(self, region: str, position: int) -> int:
        """An argument may hold its own end tag: it ends where another one or the call's end follows."""
        while (end := region.find(self.argument_end, position)) >= 0:
            position = end + len(self.argument_end)
            if region[position : position + _TAG_WINDOW].lstrip().startswith(self.end) or self.argument.match(
                region, position
            ):
                return end
        raise NoCallError("an argument without its end")


_TAG_WINDOW: Final = 256
# Names are bounded, so that a search does not run to the text's end from every tag that is never closed.
_EQUALS_TAGS = _Tags(
    re.compile(rf"<function=([^>\n]{{1,{MAX_NAME}}})>"),
    "</function>",
    re.compile(r"\s*<parameter=([^>\n]+)>"),
    "</parameter>",
)
_NAME_TAGS = _Tags(
    re.compile(rf'<invoke name="([^"\n]{{1,{MAX_NAME}}})">'),
    "</invoke>",
    re.compile(r'\s*<parameter name="([^"\n]+)"[^>\n]*>'),
    "</parameter>",
)


def _without_edges(text: str) -> str:
    """Without the line break on either side that the format puts there."""
    return text.removeprefix("\n").removesuffix("\n")


def _read_tool_call_tag(closer: str, region: str, tools: Tools) -> list[Call]:
    """What stands between `<tool_call>` tags tells by itself which of three formats it is."""
    text = region.strip()
    if text.startswith(("{", "[")):
        return calls_of(read_json(text))
    if text.startswith("<function="):
        return _EQUALS_TAGS.read(text, tools)
    if not text.endswith(closer):
        raise NoCallError("a call without its end")
    return [_read_key_value_tags(text.removesuffix(closer).rstrip(), tools)]


_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read_key_value_tags(text: str, tools: Tools) -> Call:
    """A name, then keys and values in tags."""
    name, *pairs = text.split(_KEY)
    name = name.strip()
    if re.fullmatch(r"[\w.:/-]+", name) is None:
        raise NoCallError("no name")
    arguments = {}
    for pair in pairs:
        key, key_end, rest = pair.partition(_KEY_END)
        value = rest.strip()
        if not (key_end and value.startswith(_VALUE) and value.endswith(_VALUE_END)):
            raise NoCallError("no key with a value")
        key = key.strip()
        arguments[key] = typed(value[len(_VALUE) : -len(_VALUE_END)], tools.schema_of(name, key))
    return call_of(name, arguments)


def _tool_call_tag(opener: str, closer: str) -> CallSyntax:
    return CallSyntax(
        read=partial(_read_tool_call_tag, closer),
        scanner=lambda: ByBracket(UntilMarker(closer)),
        openers=(opener,),
        closers=(closer,),
        frame=_json_frame(start=f"{opener}\n", end=f"\n{closer}", between="\n"),
    )


def _read_llama(region: str, tools: Tools) -> list[Call]:
    if region.lstrip().startswith(("{", "[")):
        return calls_of(read_json(region))
    # Its built-in tools are called as methods: brave_search.call(query="...").
    calls = python_calls(region)
    return [Call(call.name.removesuffix(".call"), call.arguments) for call in calls]


_MISTRAL_CALL = re.compile(r"\s*([\w.:/@-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _read_mistral(region: str, tools: Tools) -> list[Call]:
    if region.lstrip().startswith(("[", "{")):
        return _read_first(region, tools)
    match = _MISTRAL_CALL.fullmatch(region)
    if match is None:
        raise NoCallError("no name with arguments")
    return [call_of(match[1], match[3], match[2])]


_DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"
_DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
_FENCED = re.compile(rf"\s*(\S{{1,{MAX_NAME}}})\s*```json\s*(\{{.*\}})\s*```\s*", re.DOTALL)


def _read_deepseek(region: str, tools: Tools) -> list[Call]:
    head, _, tail = region.removesuffix(_DEEPSEEK_END).partition(_DEEPSEEK_SEPARATOR)
    if tail.lstrip().startswith("{"):
        return [call_of(head.strip(), tail)]
    match = _FENCED.fullmatch(tail)
    if match is None:
        raise NoCallError("no name with arguments")
    return [call_of(match[1], match[2])]


_KIMI_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_KIMI_END: Final = "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.:/@-]+?)(:\d+)?")


def _read_kimi(region: str, tools: Tools) -> list[Call]:
    head, _, arguments = region.removesuffix(_KIMI_END).partition(_KIMI_ARGUMENTS)
    match = _KIMI_ID.fullmatch(head.strip())
    if match is None or not arguments.strip():
        raise NoCallError("no name with arguments")
    return [call_of(match[1], arguments, head.strip() if match[2] else None)]


def _tagged(tags: _Tags, opener: str, closer: str) -> CallSyntax:
    return CallSyntax(read=tags.read, scanner=lambda: UntilMarker(closer), openers=(opener,), closers=(closer,))


def _pythonic(opener: str, closer: str, *, bare: bool) -> CallSyntax:
    return CallSyntax(
        read=_read_python,
        scanner=python_scanner,
        openers=(opener,),
        closers=(closer,),
        bare="[" if bare else "",
        bare_scanner=python_call_scanner if bare else None,
    )


TOOL_CALL_TAG = _tool_call_tag("<tool_call>", "</tool_call>")
SEED = _tagged(_EQUALS_TAGS, "<seed:tool_call>", "</seed:tool_call>")
MINIMAX = _tagged(_NAME_TAGS, "<minimax:tool_call>", "</minimax:tool_call>")
LLAMA = CallSyntax(
    read=_read_llama,
    scanner=lambda: ByBracket(UntilMarker("<|eom_id|>", "<|eot_id|>")),
    openers=("<|python_tag|>",),
    bare="{",
    bare_scanner=json_call_scanner,
    frame=_json_frame("parameters", between="; "),
)
MISTRAL = CallSyntax(
    read=_read_mistral,
    scanner=lambda: Named(r"[\s\w.:/@\[\]-]*"),
    openers=("[TOOL_CALLS]",),
    inner=("[CALL_ID]", "[ARGS]"),
    closers=("]",),
    goes_on="{",
    new_id=short_id,
    frame=_json_frame(first="[TOOL_CALLS][", last="]", between=", "),
)
DEEPSEEK = CallSyntax(
    read=_read_deepseek,
    scanner=lambda: UntilMarker(_DEEPSEEK_END),
    openers=("<｜tool▁call▁begin｜>",),
    sections=("<｜tool▁calls▁begin｜>",),
    closers=(_DEEPSEEK_END, "<｜tool▁calls▁end｜>"),
    inner=(_DEEPSEEK_SEPARATOR,),
    frame=CallFrame(
        lambda name: f"<｜tool▁call▁begin｜>{name}{_DEEPSEEK_SEPARATOR}",
        _DEEPSEEK_END,
        between="",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
)
KIMI = CallSyntax(
    read=_read_kimi,
    scanner=lambda: UntilMarker(_KIMI_END),
    openers=("<|tool_call_begin|>",),
    sections=("<|tool_calls_section_begin|>",),
    closers=(_KIMI_END, "<|tool_calls_section_end|>"),
    inner=(_KIMI_ARGUMENTS,),
    new_id=numbered_id,
    frame=CallFrame(
        lambda name: f"<|tool_call_begin|>functions.{name}{_KIMI_ARGUMENTS}",
        _KIMI_END,
        between="",
        first="<|tool_calls_section_begin|>",
        last="<|tool_calls_section_end|>",
    ),
)
LLAMA_PYTHON = _pythonic("<|python_start|>", "<|python_end|>", bare=True)
LFM = _pythonic("<|tool_call_start|>", "<|tool_call_end|>", bare=False)
OLMO = CallSyntax(
    read=lambda region, tools: python_calls(region.strip().removesuffix("</function_calls>")),
    scanner=lambda: UntilMarker("</function_calls>"),
    openers=("<function_calls>",),
    closers=("</function_calls>",),
)
GRANITE = _marked_json(("<|tool_call|>",), ("<|/tool_call|>", "<|end_of_tool_call|>"))
JAMBA = _marked_json(("<tool_calls>",), ("</tool_calls>",))
COMMAND = _marked_json(("<|START_ACTION|>",), ("<|END_ACTION|>",))
JSON = CallSyntax(
    read=_read_json,
    scanner=json_call_scanner,
    openers=("```json",),
    closers=("```",),
    bare="{[",
    bare_scanner=json_call_scanner,
    frame=_json_frame(between="\n"),
)
