"""What a reply turns out to say, piece by piece: text for the user, reasoning, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; calls never overlap.

    Attributes:
        index: which of the reply's calls, from 0.
        id: unique within the conversation; in the form that the model's chat template takes.
        name: of the tool, which may be none of those that were offered.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which join to a JSON object between its start and its end; cut off, it has no end."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A call, complete or so far.

    Attributes:
        id: see `CallStart`.
        name: of the tool.
        arguments: JSON of an object.
    """

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """All that a reply says, complete or so far.

    Attributes:
        content: text for the user.
        reasoning: what the model thought before.
        calls: of tools, in order.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take in what came next."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd():
                    pass
