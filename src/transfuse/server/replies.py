"""Reads the replies to a request as what they say: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transfuse.errors import PromptError
from transfuse.outputs import CompletionOutput
from transfuse.sampling_params import SamplingParams
from transfuse.server.deltas import Cursor, Delta
from transfuse.server.errors import FieldError
from transfuse.server.generation import ReadPrompt, Service
from transfuse.text.replies import Event, ReplyFormat, ReplyParser, Tools, choose_format, tools_of


@dataclass(frozen=True, slots=True)
class Growth:
    """What a continuation gained.

    Attributes:
        delta: as text and tokens.
        events: as what that says; text that may become a call is not among them yet.
    """

    delta: Delta
    events: list[Event]


class ReplyReader:
    """Reads one continuation.

    Attributes:
        num_reasoning_tokens: tokens of its reasoning so far, with the markers around it.
        has_calls: whether it calls a tool.

    Args:
        parser: what it says.
    """

    def __init__(self, parser: ReplyParser) -> None:
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._cursor = Cursor()
        self._num_chars = 0
        self._num_tokens = 0

    @property
    def has_calls(self) -> bool:
        """Whether it calls a tool."""
        return self._parser.num_calls > 0

    def advance(self, completion: CompletionOutput) -> Growth | None:
        """What is new; None where nothing is. After the end nothing is."""
        delta = self._cursor.advance(completion)
        if delta is None:
            return None
        events: list[Event] = []
        for end in completion.text_ends[self._num_tokens :]:
            was_reasoning = self._parser.in_reasoning
            events += self._feed(completion.text, end)
            self.num_reasoning_tokens += was_reasoning or self._parser.in_reasoning
        self._num_tokens = len(completion.text_ends)
        events += self._feed(completion.text, len(completion.text))
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return Growth(delta, events)

    def _feed(self, text: str, end: int) -> list[Event]:
        piece = text[self._num_chars : end]
        self._num_chars = max(self._num_chars, end)
        return self._parser.feed(piece) if piece else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, whichever API it came by.

    Attributes:
        tools: in the shape of the OpenAI API: `{"type": "function", "function": {...}}`.
        mode: whether the model may call some, must, or must not.
        name: the only one that it may call; None for any.
        is_parallel: whether it may make several calls at once.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    is_parallel: bool = True

    @property
    def names(self) -> list[str]:
        """Of the tools."""
        return [tool["function"]["name"] for tool in self.tools]

    def check(self) -> None:
        """Raise where tools and their use contradict each other.

        Raises:
            FieldError: they do.
        """
        if self.mode == "required" and not self.tools:
            raise FieldError("tool_choice", "tool_choice asks for a call, and there are no tools; send some.")
        if self.name is not None and self.name not in self.names:
            raise FieldError("tool_choice", f"tool_choice names {self.name[:100]!r}, which is none of the tools.")
        if self.mode == "required":
            raise FieldError(
                "tool_choice", 'calls cannot be forced yet; set tool_choice to "auto".', "unsupported_parameter"
            )


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How the replies to a request are read.

    Attributes:
        format: of the model.
        tools: what may be called.
        special: markers of the format that are special tokens.
    """

    format: ReplyFormat
    tools: Tools
    special: frozenset[str]

    def params(self, params: SamplingParams) -> SamplingParams:
        """How to sample, so that replies can be read."""
        return replace(params, keep_special_tokens=sorted(self.special))

    def reader(self, prompt: ReadPrompt) -> ReplyReader:
        """Reads one reply to a prompt."""
        return ReplyReader(self.format.parser(prompt.text or "", self.tools, self.special))


def plan_replies(service: Service, use: ToolUse, chat_template: str | None = None) -> ReplyPlan:
    """How the replies to a request are read.

    Args:
        service: what to work with.
        use: the tools.
        chat_template: the template that lays the request out, if it is not the server's.

    Raises:
        FieldError: tools and their use contradict each other.
        PromptError: the template lays out no tools, and some may be called.
    """
    use.check()
    tokenizer, settings = service.llm.tokenizer, service.settings
    source = tokenizer.templates.find(chat_template or settings.chat_template, has_tools=bool(use.tools))
    chosen = choose_format(source, settings.tool_call_parser, settings.reasoning_parser)
    callable_tools = () if use.mode == "none" else use.tools
    if callable_tools and not chosen.reads_calls:
        raise PromptError(
            "The model's chat template lays out no tools, so the model would not know of them. Leave tools out, or "
            "start the server with another --chat-template."
        )
    special = frozenset(chosen.markers) & tokenizer.special_tokens.keys()
    return ReplyPlan(chosen, tools_of(callable_tools, None if use.is_parallel else 1), special)
