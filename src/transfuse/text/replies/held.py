"""Reads replies that a grammar holds to calls: their arguments are passed on as they are written."""

from __future__ import annotations

from collections.abc import Collection

from transfuse.text.replies.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.scanners import Scanner, json_scanner
from transfuse.text.replies.syntax import CallSyntax
from transfuse.text.replies.thinking import ThinkingSplitter
from transfuse.text.replies.tools import Tools


class HeldParser(ReplyParser):
    """Reasoning first, then calls in their frames and nothing else; see `ReplyParser`.

    What is written between frame and frame is known to the letter, and arguments to be JSON of an object, so they need
    not be waited for. Where the reply is cut off within a call, half of it has been told.

    Args:
        tools: what may be called.
        names: of those tools that the grammar knows.
        syntax: how calls are written; with a frame.
        thinking: parts off the reasoning; None where there is none.
        hidden: markers that are special tokens, which users never see.
        waits: whether a call is told once it is whole, and is text where it never is.
    """

    def __init__(
        self,
        tools: Tools,
        names: Collection[str],
        syntax: CallSyntax,
        thinking: ThinkingSplitter | None,
        hidden: Collection[str],
        *,
        waits: bool,
    ) -> None:
        super().__init__(tools, syntax.new_id)
        assert syntax.frame is not None, "it is held"
        self._befores = {syntax.frame.before(name): name for name in names}
        self._end = syntax.frame.after + syntax.frame.last
        self._thinking = thinking
        self._hidden = tuple(hidden)
        self._waits = waits
        self._told: list[Event] = []
        self._call: list[Event] = []  # that is being read, where it is waited for
        self._raw = ""  # what stands before a call, and where that is waited for, the call so far
        self._arguments: Scanner | None = None  # that are being read

    @property
    def in_reasoning(self) -> bool:
        """See `ReplyParser.in_reasoning`."""
        return self._thinking is not None and self._thinking.in_reasoning

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        if self._thinking is not None:
            text = self._reason(*self._thinking.feed(text))
        self._read(text)
        return self._take()

    def finish(self) -> list[Event]:
        """See `ReplyParser.finish`."""
        if self._thinking is not None:
            self._read(self._reason(*self._thinking.finish()))
        text = self._raw
        if self._arguments is not None:
            self._num_calls -= 1  # which is none: it is cut off
            text = text if self._waits else ""
        elif self._num_calls and self._end.startswith(text):
            text = ""
        for marker in self._hidden:
            text = text.replace(marker, "")
        if text:
            self._told.append(Content(text))
        return self._take()

    def _take(self) -> list[Event]:
        told, self._told = self._told, []
        return told

    def _reason(self, reasoning: str, text: str) -> str:
        if reasoning:
            self._told.append(Reasoning(reasoning))
        return text

    def _read(self, text: str) -> None:
        while text:
            text = self._read_frame(text) if self._arguments is None else self._read_arguments(self._arguments, text)

    def _read_frame(self, text: str) -> str:
        known, self._raw = self._raw + text, ""
        before = min((one for one in self._befores if one in known), key=known.index, default=None)
        if before is None:
            self._raw = known
            return ""
        name, index = self._befores[before], self._num_calls
        head, _, rest = known.partition(before)
        self._num_calls += 1
        self._arguments = json_scanner()
        self._raw = head.removeprefix(self._end) + before if self._waits else ""
        self._tell(CallStart(index, self._new_id(name, index), name))
        return rest

    def _read_arguments(self, arguments: Scanner, text: str) -> str:
        end = arguments.feed(text)
        piece, index = text[:end], self._num_calls - 1
        self._tell(CallArguments(index, piece))
        if end is None:
            self._raw += piece if self._waits else ""
            return ""
        self._tell(CallEnd(index))
        self._told += self._call
        self._call, self._raw, self._arguments = [], "", None
        return text[end:]

    def _tell(self, event: Event) -> None:
        (self._call if self._waits else self._told).append(event)
