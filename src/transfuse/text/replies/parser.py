"""Reads replies as they come; what every reader of them offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from transfuse.text.replies.calls import Call
from transfuse.text.replies.events import CallArguments, CallEnd, CallStart, Event
from transfuse.text.replies.tools import Tools, long_id


class ReplyParser(ABC):
    """Reads one reply. Events do not depend on how its text was cut, and come as early as they are certain.

    A call comes once it is whole and its arguments are JSON: what a model began and did not end, or wrote against its
    own format, is text for the user; but see `HeldParser`. Nothing that a model writes raises.

    Args:
        tools: what may be called.
        new_id: makes the id of a call that has none from its name and index.
    """

    def __init__(self, tools: Tools, new_id: Callable[[str, int], str] = long_id) -> None:
        self._tools = tools
        self._new_id = new_id
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._num_calls

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """Whether the text goes on with reasoning, as far as is known."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Read on; what has become certain."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The text has ended, wherever that was; what was held back. Nothing may follow."""

    def _call_events(self, calls: list[Call]) -> list[Event]:
        events: list[Event] = []
        for call in calls:
            if self._num_calls == self._tools.max_calls:
                break
            index, self._num_calls = self._num_calls, self._num_calls + 1
            call_id = call.id or self._new_id(call.name, index)
            events += [CallStart(index, call_id, call.name), CallArguments(index, call.arguments), CallEnd(index)]
        return events
