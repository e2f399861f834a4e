"""Reads replies in which markers set off reasoning and calls from text."""

from __future__ import annotations

from collections.abc import Collection

from transfuse.text.replies.calls import NoCallError
from transfuse.text.replies.events import Content, Event, Reasoning
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.scanners import Scanner, json_scanner
from transfuse.text.replies.syntax import CallSyntax
from transfuse.text.replies.thinking import ThinkingSplitter
from transfuse.text.replies.tools import Tools, long_id
from transfuse.text.stop_strings import StopStringMatcher

_SEPARATORS = ",;"


class MarkedParser(ReplyParser):
    """Reasoning first, then text and calls; see `ReplyParser`.

    White space between text and a call belongs to neither.

    Args:
        tools: what may be called.
        syntax: how calls are written; None where none are looked for.
        thinking: parts off the reasoning; None where there is none.
        hidden: markers that are special tokens, which users never see.
    """

    def __init__(
        self, tools: Tools, syntax: CallSyntax | None, thinking: ThinkingSplitter | None, hidden: Collection[str]
    ) -> None:
        super().__init__(tools, long_id if syntax is None else syntax.new_id)
        self._thinking = thinking
        self._hidden = tuple(hidden)
        self._syntax = syntax
        markers = () if syntax is None else syntax.openers + syntax.sections
        self._matcher = StopStringMatcher(tuple(dict.fromkeys(markers + self._hidden)))
        # Where a call may begin: the longest first, since one may begin another.
        self._at_start = sorted({*markers, *self._hidden}, key=len, reverse=True)
        closers = () if syntax is None else syntax.closers
        self._behind_call = sorted({*self._at_start, *closers}, key=len, reverse=True)
        self._events: list[Event] = []
        self._held = ""  # may become a marker
        self._space = ""  # at the end of the text so far
        self._edge: str | None = None if syntax is None else ""  # where a call may begin; what is known of it
        self._scanner: Scanner | None = None  # of the region that is being read
        self._opener = ""
        self._region: list[str] = []
        self._has_content = False

    @property
    def in_reasoning(self) -> bool:
        """See `ReplyParser.in_reasoning`."""
        return self._thinking is not None and self._thinking.in_reasoning

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        if self._thinking is not None:
            text = self._reason(*self._thinking.feed(text))
        self._read(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        """See `ReplyParser.finish`."""
        if self._thinking is not None:
            self._read(self._reason(*self._thinking.finish()))
        if self._scanner is not None:
            self._finish_region()
        if self._edge is not None:
            edge, self._edge = self._edge, None
            self._add("" if self._num_calls and self._may_close(edge) else edge)
        self._add(self._held)
        if self._space and not self._num_calls:
            self._events.append(Content(self._space))
        return self._take_events()

    @property
    def _brackets(self) -> str:
        """What a region without a marker begins with, here."""
        assert self._syntax is not None
        return self._syntax.bare + (self._syntax.goes_on if self._num_calls else "")

    def _may_close(self, text: str) -> bool:
        """Whether a text at the reply's end is what follows a call, or the beginning of that."""
        assert self._syntax is not None
        text = text.strip(_SEPARATORS + " \n\t") if self._brackets else text.strip()
        return any(closer.startswith(text) for closer in self._syntax.closers) or not text

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _reason(self, reasoning: str, text: str) -> str:
        if reasoning:
            self._events.append(Reasoning(reasoning))
        return text

    def _read(self, text: str) -> None:
        while text:
            if self._scanner is not None:
                text = self._read_region(self._scanner, text)
            elif self._edge is not None:
                text = self._read_edge(self._edge + text)
            else:
                text = self._read_text(text)

    def _read_text(self, text: str) -> str:
        match = self._matcher.read(text)
        known = self._held + text
        if match is None:
            cut = len(known) - self._matcher.num_held
            self._held = known[cut:]
            self._add(known[:cut])
            return ""
        end = len(self._held) + match.end
        self._held = ""
        self._matcher.restart()
        self._add(known[: end - len(match.stop)])
        self._take_marker(match.stop)
        return known[end:]

    def _take_marker(self, marker: str) -> None:
        assert self._syntax is not None or marker in self._hidden
        if self._syntax is not None and marker in self._syntax.openers:
            self._begin(marker)
        elif self._syntax is not None and marker in self._syntax.sections:
            self._edge = ""

    def _read_edge(self, text: str) -> str:
        """Text where a call may begin: at the start, and behind another one."""
        assert self._syntax is not None
        start = text.lstrip()
        markers = self._behind_call if self._num_calls else self._at_start
        if any(len(marker) > len(start) and marker.startswith(start) for marker in markers):
            self._edge = text
            return ""
        for marker in markers:
            if start.startswith(marker):
                self._edge = ""
                self._space += text[: len(text) - len(start)]
                self._take_marker(marker)
                return start[len(marker) :]
        bare = start.lstrip(_SEPARATORS + " \n\t") if self._num_calls and self._brackets else start
        if not bare:
            self._edge = text
            return ""
        if bare[0] in self._brackets:
            self._space += text[: len(text) - len(bare)]
            self._begin("")
            return bare
        self._edge = None
        # Behind a call, white space parts two texts and does not begin one.
        return start if self._num_calls and not self._has_content else text

    def _begin(self, opener: str) -> None:
        assert self._syntax is not None
        self._edge = None
        self._opener, self._region = opener, []
        self._scanner = self._syntax.scanner() if opener else (self._syntax.bare_scanner or json_scanner)()

    def _read_region(self, scanner: Scanner, text: str) -> str:
        try:
            end = scanner.feed(text)
        except NoCallError:
            return self._give_up("".join(self._region) + text)
        self._region.append(text[:end])
        if end is None:
            return ""
        region = "".join(self._region)
        if self._take_calls(region):
            return text[end:]
        # Of what begins several times and ends once, the last may be a call.
        last = region.rfind(self._opener) if self._opener else -1
        last = len(region) if last < 0 else last
        self._give_up("")
        self._add(region[:last])
        return region[last:] + text[end:]

    def _give_up(self, text: str) -> str:
        """The region is text: its opener is shown, what follows is to be read anew."""
        self._scanner = None
        self._add(self._opener)
        return text

    def _take_calls(self, region: str) -> bool:
        assert self._syntax is not None
        try:
            calls = self._syntax.read(region, self._tools)
        except NoCallError:
            return False
        if not self._opener and self._syntax.bare and any(call.name not in self._tools.parameters for call in calls):
            return False  # other JSON that has a name, too
        self._events += self._call_events(calls)
        self._scanner, self._edge, self._space = None, "", ""
        return True

    def _finish_region(self) -> None:
        region = "".join(self._region)
        if not self._take_calls(region):
            self._scanner = None
            self._add(self._opener + region)

    def _add(self, text: str) -> None:
        """Text for the user; white space at its end waits for what follows."""
        text = self._space + self._without_hidden(text)
        end = len(text) if self._syntax is None else len(text.rstrip())
        self._space = text[end:]
        if end:
            self._has_content = True
            self._events.append(Content(text[:end]))

    def _without_hidden(self, text: str) -> str:
        for marker in self._hidden:
            text = text.replace(marker, "")
        return text
