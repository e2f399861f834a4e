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
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.replies import Event, ReplyFormat, ReplyParser, Tools, choose_format, tools_of
from transfuse.text.replies.grammars import Demand, structure_term


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
    def in_reasoning(self) -> bool:
        """Whether its text goes on with reasoning, as far as is known."""
        return self._parser.in_reasoning

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


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any], *, strict: bool | None = None, **more: Any
) -> dict[str, Any]:
    """A tool in the shape of the OpenAI API, which is how chat templates read it, whichever API it came by.

    Args:
        name: that the model knows it by.
        description: None where there is none.
        parameters: JSON schema of its arguments.
        strict: hold the arguments to the schema.
        **more: further fields, for templates that read them.
    """
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function | more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, whichever API it came by.

    Attributes:
        tools: see `function_tool`.
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

    @property
    def max_calls(self) -> int | None:
        """Most calls of an answer; None for any number. A tool that is named is called once, as OpenAI has it."""
        return None if self.is_parallel and self.name is None else 1

    def check(self) -> None:
        """Raise where tools and their use contradict each other.

        Raises:
            FieldError: they do.
        """
        if self.mode == "required" and not self.tools:
            raise FieldError("tool_choice", "tool_choice asks for a call, and there are no tools; send some.")
        if self.name is not None and self.name not in self.names:
            raise FieldError("tool_choice", f"tool_choice names {self.name[:100]!r}, which is none of the tools.")


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How the replies to a request are read, and what the model is held to in them.

    Attributes:
        format: of the model.
        tools: what may be called.
        special: ids of the model's special tokens, by their text.
        demand: what calls are held to; without tools, to nothing.
    """

    format: ReplyFormat
    tools: Tools
    special: Mapping[str, int]
    demand: Demand

    def adapt(self, params: SamplingParams, prompt: ReadPrompt) -> SamplingParams:
        """How to sample after a prompt, so that the reply can be read and is what was asked for.

        Raises:
            FieldError: calls of tools and the form of the answer do not go together.
        """
        params = replace(params, keep_special_tokens=sorted(self.format.shown(self.special)))
        demand = self._whole_demand(params.structured_outputs, prompt)
        if demand is None:
            return params
        grammar = self.format.grammar(prompt.text or "", demand, self.special)
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))

    def _whole_demand(self, structure: StructuredOutputsParams | None, prompt: ReadPrompt) -> Demand | None:
        """What is asked for, as far as `structure` does not say it already."""
        if structure is None:
            return self.demand if self.demand.tools else None
        if self.demand.must_call:
            return self.demand
        if not self.tools and not self.format.reads_reasoning:
            return None
        if structure.kind == "grammar" and not self.tools and not self.reader(prompt).in_reasoning:
            return None  # it holds for the whole reply, which begins without reasoning then
        if self.tools and not self.format.tells_calls_from_json:
            raise FieldError(
                "tools",
                "This model's calls are JSON where they are held to schemas, which cannot be told from an answer that "
                'is held to a form. Leave out either, or set tool_choice to "none" or "required".',
                "unsupported_parameter",
            )
        return replace(self.demand, tools=self.demand.tools or self.tools.parameters, body=structure_term(structure))

    def reader(self, prompt: ReadPrompt, *, streams: bool = False) -> ReplyReader:
        """Reads one reply to a prompt.

        Args:
            prompt: what is replied to.
            streams: whether pieces of a call are of use before it is whole.
        """
        text, shown = prompt.text or "", self.format.shown(self.special)
        if self.demand.must_call:
            names = self.demand.tools
            return ReplyReader(self.format.held_parser(text, self.tools, names, shown, waits=not streams))
        return ReplyReader(self.format.parser(text, self.tools, shown))


def plan_replies(service: Service, use: ToolUse, chat_template: str | None = None) -> ReplyPlan:
    """How the replies to a request are read.

    Args:
        service: what to work with.
        use: the tools.
        chat_template: the template that lays the request out, if it is not the server's.

    Raises:
        FieldError: tools and their use contradict each other, or calls cannot be held to a schema.
        PromptError: the template lays out no tools, and some may be called.
    """
    use.check()
    tokenizer, settings = service.llm.tokenizer, service.settings
    source = tokenizer.templates.find(chat_template or settings.chat_template, has_tools=bool(use.tools))
    declared = tokenizer.spec.response_template
    chosen = choose_format(source, settings.tool_call_parser, settings.reasoning_parser, declared)
    tools = tools_of(() if use.mode == "none" else use.tools, use.max_calls)
    if tools and not chosen.reads_calls:
        raise PromptError(
            "The model's chat template lays out no tools, so the model would not know of them. Leave tools out, or "
            "start the server with another --chat-template."
        )
    demand = _demand(use, tools)
    if demand.must_call:
        chosen = chosen.held()
    elif demand.tools and chosen.held() is not chosen:
        raise FieldError(
            "tools",
            "strict holds for this model's way of writing calls only where one is forced; leave strict out, or set "
            'tool_choice to "required".',
            "unsupported_parameter",
        )
    return ReplyPlan(chosen, tools, tokenizer.special_tokens, demand)


def _demand(use: ToolUse, tools: Tools) -> Demand:
    """What calls are held to: all of them where one is forced, or one tool is strict."""
    strict = {tool["function"]["name"] for tool in use.tools if tool["function"].get("strict")}
    must_call = use.mode == "required"
    if not tools or not (must_call or strict):
        return Demand()
    held: dict[str, Mapping[str, Any]] = {}
    for name, schema in tools.parameters.items():
        if use.name not in (None, name):
            continue
        if schema.get("type", "object") != "object":
            raise FieldError("tools", f"The parameters of {name[:100]!r} are no object; set their type to object.")
        if must_call or name in strict:
            # Arguments that a tool does not know are of no use to it, whatever the schema leaves open.
            known = {} if "properties" not in schema else {"additionalProperties": False}
            held[name] = {**known, **schema, "type": "object"}
        else:
            held[name] = {"type": "object"}
    return Demand(tools=held, must_call=must_call, is_parallel=use.max_calls is None)
