"""Chooses how a model's replies are read: by the markers in its chat template, or by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Protocol

from transfuse.errors import ConfigError
from transfuse.text.replies import families
from transfuse.text.replies.declared import CALLS_FIELD, REASONING_FIELDS, DeclaredParser
from transfuse.text.replies.declared_template import DeclaredTemplate, read_template
from transfuse.text.replies.grammars import Demand, ReplyGrammar
from transfuse.text.replies.harmony import HarmonyFormat
from transfuse.text.replies.held import HeldParser
from transfuse.text.replies.marked import MarkedParser
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.syntax import CallSyntax
from transfuse.text.replies.thinking import ThinkingSplitter, ThinkingSyntax
from transfuse.text.replies.tools import Tools

log = logging.getLogger(__name__)


class ReplyFormat(Protocol):
    """How a model's replies are read."""

    def shown(self, special: Collection[str]) -> frozenset[str]:
        """Those of the special tokens that the reader must see."""
        ...

    @property
    def reads_calls(self) -> bool:
        """Whether it knows how calls are written."""
        ...

    @property
    def reads_reasoning(self) -> bool:
        """Whether it knows how reasoning is set off."""
        ...

    @property
    def tells_calls_from_json(self) -> bool:
        """Whether calls that are held to schemas begin otherwise than JSON does."""
        ...

    def held(self) -> ReplyFormat:
        """The format of replies whose calls are held to schemas: this one, unless its calls cannot be."""
        ...

    def grammar(self, prompt: str, demand: Demand, special: Mapping[str, int]) -> str:
        """The grammar of a reply, in Lark; of a format that is `held`.

        Args:
            prompt: see `parser`.
            demand: what it must be.
            special: ids of all special tokens, by their text.
        """
        ...

    def parser(self, prompt: str, tools: Tools, special: Collection[str] = ()) -> ReplyParser:
        """Reads one reply.

        Args:
            prompt: the conversation as text, which may end within the reply: templates open its reasoning.
            tools: what may be called; without any, no calls are looked for.
            special: the special tokens that are `shown`, which users never see.
        """
        ...

    def held_parser(
        self, prompt: str, tools: Tools, names: Collection[str], special: Collection[str], *, waits: bool
    ) -> ReplyParser:
        """Reads one reply that a grammar holds to calls; of a format that is `held`.

        Args:
            prompt: see `parser`.
            tools: likewise.
            names: of the tools that the grammar knows.
            special: see `parser`.
            waits: whether a call is told only once it is whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """Reasoning and calls are set off from text by markers.

    Attributes:
        calls: how calls are written; None where that is not known.
        thinking: how reasoning is set off; None where it is not.
    """

    calls: CallSyntax | None = None
    thinking: ThinkingSyntax | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that set reasoning and calls off."""
        return (self.calls.markers if self.calls else ()) + (self.thinking.markers if self.thinking else ())

    def shown(self, special: Collection[str]) -> frozenset[str]:
        """See `ReplyFormat.shown`."""
        return frozenset(self.markers).intersection(special)

    @property
    def reads_calls(self) -> bool:
        """See `ReplyFormat.reads_calls`."""
        return self.calls is not None

    @property
    def reads_reasoning(self) -> bool:
        """See `ReplyFormat.reads_reasoning`."""
        return self.thinking is not None

    @property
    def tells_calls_from_json(self) -> bool:
        """See `ReplyFormat.tells_calls_from_json`."""
        return self.calls is not None and bool(self.calls.frame_opener)

    def held(self) -> MarkedFormat:
        """See `ReplyFormat.held`."""
        has_frame = self.calls is not None and self.calls.frame is not None
        return self if has_frame else replace(self, calls=families.JSON)

    def grammar(self, prompt: str, demand: Demand, special: Mapping[str, int]) -> str:
        """See `ReplyFormat.grammar`."""
        grammar = ReplyGrammar(special)
        thinking = "" if self.thinking is None else self.thinking.rules(prompt, grammar)
        if demand.tools:
            assert self.calls is not None, "it is held"
            return grammar.text(thinking, grammar.replies(self.calls, demand))
        assert demand.body is not None, "something is demanded"
        grammar.add(f"replies: {demand.body}")
        return grammar.text(thinking, "replies")

    def parser(self, prompt: str, tools: Tools, special: Collection[str] = ()) -> ReplyParser:
        """See `ReplyFormat.parser`."""
        return MarkedParser(tools, self.calls if tools else None, self._splitter(prompt, special), special)

    def held_parser(
        self, prompt: str, tools: Tools, names: Collection[str], special: Collection[str], *, waits: bool
    ) -> ReplyParser:
        """See `ReplyFormat.held_parser`."""
        assert self.calls is not None, "it is held"
        return HeldParser(tools, names, self.calls, self._splitter(prompt, special), special, waits=waits)

    def _splitter(self, prompt: str, special: Collection[str]) -> ThinkingSplitter | None:
        if self.thinking is None:
            return None
        return ThinkingSplitter(self.thinking, is_open=self.thinking.is_open(prompt), hidden=special)


@dataclass(frozen=True, slots=True)
class DeclaredFormat:
    """The tokenizer says how replies are read.

    Attributes:
        template: what it says.
        source: the same as JSON.
    """

    template: DeclaredTemplate
    source: str

    @property
    def reads_calls(self) -> bool:
        """See `ReplyFormat.reads_calls`."""
        return any(field.name == CALLS_FIELD for field in self.template.fields)

    @property
    def reads_reasoning(self) -> bool:
        """See `ReplyFormat.reads_reasoning`."""
        return any(field.name in REASONING_FIELDS for field in self.template.fields)

    @property
    def tells_calls_from_json(self) -> bool:
        """See `ReplyFormat.tells_calls_from_json`."""
        return False

    def shown(self, special: Collection[str]) -> frozenset[str]:
        """See `ReplyFormat.shown`: those that it names, in patterns too."""
        named = self.source.replace("\\", "")
        return frozenset(token for token in special if token in named)

    def held(self) -> MarkedFormat:
        """See `ReplyFormat.held`: how it is written is known of reasoning at most."""
        for field in self.template.fields:
            if field.name in REASONING_FIELDS and field.start and field.end:
                opener, closer = field.start.literals, field.end.literals
                if opener and closer:
                    return MarkedFormat(families.JSON, ThinkingSyntax(opener[0], closer[0]))
        return MarkedFormat(families.JSON)

    def grammar(self, prompt: str, demand: Demand, special: Mapping[str, int]) -> str:
        """See `ReplyFormat.grammar`."""
        return self.held().grammar(prompt, demand, special)

    def parser(self, prompt: str, tools: Tools, special: Collection[str] = ()) -> ReplyParser:
        """See `ReplyFormat.parser`."""
        return DeclaredParser(tools, self.template, prompt, special)

    def held_parser(
        self, prompt: str, tools: Tools, names: Collection[str], special: Collection[str], *, waits: bool
    ) -> ReplyParser:
        """See `ReplyFormat.held_parser`."""
        return self.held().held_parser(prompt, tools, names, special, waits=waits)


_THINK = ThinkingSyntax("<think>", "</think>")
_ALWAYS_THINK = ThinkingSyntax("<think>", "</think>", always=True)
_MISTRAL_THINK = ThinkingSyntax("[THINK]", "[/THINK]")
_SEED_THINK = ThinkingSyntax("<seed:think>", "</seed:think>")
_COMMAND_THINK = ThinkingSyntax("<|START_THINKING|>", "<|END_THINKING|>")
_HARMONY = HarmonyFormat()

# What a template that lays such calls out holds; the first that is found counts.
_CALLS_BY_MARKER: Final = (
    ("<｜tool▁calls▁begin｜>", families.DEEPSEEK),
    ("<|tool_calls_section_begin|>", families.KIMI),
    ("[TOOL_CALLS]", families.MISTRAL),
    ("<|python_start|>", families.LLAMA_PYTHON),
    ("<|python_tag|>", families.LLAMA),
    ("<|tool_call_start|>", families.LFM),
    ("<|START_ACTION|>", families.COMMAND),
    ("<minimax:tool_call>", families.MINIMAX),
    ("<seed:tool_call>", families.SEED),
    ("<|tool_call|>", families.GRANITE),
    ("<tool_call>", families.TOOL_CALL_TAG),
    ("<tool_calls>", families.JAMBA),
    ("<function_calls>", families.OLMO),
    ("tools", families.JSON),
)
_THINKING_BY_MARKER: Final = (
    ("[THINK]", _MISTRAL_THINK),
    ("<seed:think>", _SEED_THINK),
    ("<|START_THINKING|>", _COMMAND_THINK),
    ("</think>", _THINK),
)

# vLLM's names.
TOOL_CALL_PARSERS: Final[dict[str, CallSyntax | HarmonyFormat]] = {
    "hermes": families.TOOL_CALL_TAG,
    "qwen3_coder": families.TOOL_CALL_TAG,
    "qwen3_xml": families.TOOL_CALL_TAG,
    "glm45": families.TOOL_CALL_TAG,
    "llama3_json": families.LLAMA,
    "llama4_json": families.LLAMA,
    "llama4_pythonic": families.LLAMA_PYTHON,
    "pythonic": families.LLAMA_PYTHON,
    "lfm2": families.LFM,
    "olmo3": families.OLMO,
    "mistral": families.MISTRAL,
    "deepseek_v3": families.DEEPSEEK,
    "deepseek_v31": families.DEEPSEEK,
    "kimi_k2": families.KIMI,
    "granite": families.GRANITE,
    "phi4_mini_json": families.GRANITE,
    "jamba": families.JAMBA,
    "cohere_command": families.COMMAND,
    "minimax_m2": families.MINIMAX,
    "seed_oss": families.SEED,
    "json": families.JSON,
    "openai": _HARMONY,
}
REASONING_PARSERS: Final[dict[str, ThinkingSyntax | HarmonyFormat]] = {
    "qwen3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "deepseek_r1": _ALWAYS_THINK,
    "mistral": _MISTRAL_THINK,
    "seed_oss": _SEED_THINK,
    "cohere_command": _COMMAND_THINK,
    "openai_gptoss": _HARMONY,
}
AUTO: Final = "auto"
NONE: Final = "none"


@lru_cache(maxsize=64)
def choose_format(
    template: str | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO, declared: str = ""
) -> ReplyFormat:
    """How the replies to a chat template are read.

    Args:
        template: its source; None where there is none.
        tool_call_parser: a name of `TOOL_CALL_PARSERS`, `none`, or `auto` for what the template shows.
        reasoning_parser: a name of `REASONING_PARSERS`, `none`, or `auto`.
        declared: the tokenizer's response template as JSON, which goes before what the chat template shows; empty
            where it has none.

    Raises:
        ConfigError: there is no such name, or the two do not go together.
    """
    source = template or ""
    _check_name("tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    _check_name("reasoning-parser", reasoning_parser, REASONING_PARSERS)
    calls = TOOL_CALL_PARSERS.get(tool_call_parser)
    thinking = REASONING_PARSERS.get(reasoning_parser)
    if calls is _HARMONY or thinking is _HARMONY:
        others = {id(one) for one in (calls, thinking) if one is not None} - {id(_HARMONY)}
        if others or NONE in (tool_call_parser, reasoning_parser):
            raise ConfigError(
                f"--tool-call-parser {tool_call_parser} and --reasoning-parser {reasoning_parser} do not go together: "
                "Harmony is a format for all of a reply. Leave one of them out."
            )
        return _HARMONY
    is_auto = tool_call_parser == reasoning_parser == AUTO
    if is_auto and declared and (found := _declared(declared)) is not None:
        return found
    if is_auto and "<|channel|>" in source and "<|message|>" in source:
        return _HARMONY
    if tool_call_parser == AUTO:
        calls = next((syntax for marker, syntax in _CALLS_BY_MARKER if marker in source), None)
    if reasoning_parser == AUTO:
        thinking = next((syntax for marker, syntax in _THINKING_BY_MARKER if marker in source), None)
    assert not isinstance(calls, HarmonyFormat) and not isinstance(thinking, HarmonyFormat)
    return MarkedFormat(calls, thinking)


def _declared(source: str) -> DeclaredFormat | None:
    try:
        return DeclaredFormat(read_template(json.loads(source)), source)
    except ValueError as error:
        log.warning("the tokenizer's response_template cannot be read: %s; the chat template's markers count", error)
        return None


def _check_name(option: str, name: str, known: Collection[str]) -> None:
    if name not in known and name not in (AUTO, NONE):
        names = ", ".join(sorted([*known, AUTO, NONE]))
        raise ConfigError(f"--{option} is {name!r}; expected one of {names}.")
