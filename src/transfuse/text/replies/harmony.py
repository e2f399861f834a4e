"""Reads replies in OpenAI's Harmony format: messages, each with a channel and maybe a recipient."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from transfuse.text.replies.calls import NoCallError, call_of
from transfuse.text.replies.events import Content, Event, Reasoning
from transfuse.text.replies.grammars import Demand, ReplyGrammar
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.syntax import CallFrame
from transfuse.text.replies.tools import Tools
from transfuse.text.stop_strings import StopStringMatcher

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_TURN: Final = f"{_START}assistant"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS: Final = "functions."
_FRAME = CallFrame(lambda name: f"{_CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json{_MESSAGE}", "")


class HarmonyFormat:
    """The format of GPT-OSS: analysis is reasoning, what is sent to a function a call, the rest text.

    https://github.com/openai/harmony describes it.
    """

    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    reads_calls = True
    reads_reasoning = True
    tells_calls_from_json = True

    def shown(self, special: Collection[str]) -> frozenset[str]:
        """See `ReplyFormat.shown`."""
        return frozenset(self.markers).intersection(special)

    def held(self) -> HarmonyFormat:
        """See `ReplyFormat.held`."""
        return self

    def grammar(self, prompt: str, demand: Demand, special: Mapping[str, int]) -> str:
        """See `ReplyFormat.grammar`: messages to the user or to itself, then a call, or what is demanded instead."""
        grammar = ReplyGrammar(special)
        grammar.add("TEXT: /(?s:.*)/")
        begin, again = grammar.terms(_MESSAGE), grammar.terms(f"<|end|>{_TURN}")
        grammar.add(f'message: {grammar.terms(_CHANNEL)} ("analysis" | "commentary") {begin} TEXT {again}')
        last: list[str] = []
        if demand.tools:
            last.append(grammar.calls(_FRAME, demand))
        if not demand.must_call:
            last.append(f"{grammar.terms(f'{_CHANNEL}final{_MESSAGE}')} {demand.body or 'TEXT'}")
        grammar.add(f"last: {' | '.join(last)}")
        return grammar.text("message*", "last")

    def parser(self, prompt: str, tools: Tools, special: Collection[str] = ()) -> ReplyParser:
        """See `ReplyFormat.parser`; no marker is ever shown, whether it is a special token or not."""
        parser = HarmonyParser(tools)
        turn = prompt.rfind(_TURN)
        if turn >= 0:
            parser.feed(prompt[turn + len(_TURN) :])  # what the template has said for the model
        return parser

    def held_parser(
        self, prompt: str, tools: Tools, names: Collection[str], special: Collection[str], *, waits: bool
    ) -> ReplyParser:
        """See `ReplyFormat.held_parser`: a call ends with its message, and is told then."""
        return self.parser(prompt, tools, special)


class HarmonyParser(ReplyParser):
    """See `ReplyParser` and `HarmonyFormat`."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._matcher = StopStringMatcher(HarmonyFormat.markers)
        self._events: list[Event] = []
        self._held = ""  # may become a marker
        self._header: str | None = ""  # None within a message
        self._channel = ""
        self._recipient = ""
        self._body: list[str] = []  # of a message to a recipient
        self._has_said: set[type[Content | Reasoning]] = set()
        self._is_first = False  # whether the message has said nothing yet

    @property
    def in_reasoning(self) -> bool:
        """See `ReplyParser.in_reasoning`."""
        if self._header is not None:
            return not self._has_said
        return self._channel == "analysis" and not self._recipient

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        while text:
            match = self._matcher.read(text)
            known = self._held + text
            if match is None:
                cut = len(known) - self._matcher.num_held
                self._held = known[cut:]
                self._take_text(known[:cut])
                break
            end = len(self._held) + match.end
            self._held = ""
            self._matcher.restart()
            self._take_text(known[: end - len(match.stop)])
            self._take_marker(match.stop)
            text = known[end:]
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """See `ReplyParser.finish`."""
        self._take_text(self._held)
        self._end_message()
        events, self._events = self._events, []
        return events

    def _take_marker(self, marker: str) -> None:
        if marker == _MESSAGE:
            if self._header is not None:
                self._begin_message(self._header)
        elif self._header is not None and marker in (_CHANNEL, _CONSTRAIN):
            self._header += marker
        elif marker != _CONSTRAIN:  # an end, or the start of what comes next where a model left the end out
            self._end_message()
            self._header = marker if marker in (_CHANNEL, _START) else _START

    def _begin_message(self, header: str) -> None:
        channel, recipient = _NAME_OF_CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = "final" if channel is None else channel[1]
        self._recipient = "" if recipient is None else recipient[1]
        self._header, self._is_first = None, True

    def _take_text(self, text: str) -> None:
        if self._header is not None:
            self._header += text
            start = self._header.lstrip()
            if start and not start.startswith(("<|", "to=")) and not "to=".startswith(start):
                # It began to talk without a header.
                self._begin_message("")
                text = start
            else:
                return
        if self._recipient:
            self._body.append(text)
        elif text:
            self._say(Reasoning if self._channel == "analysis" else Content, text)

    def _say(self, kind: type[Content | Reasoning], text: str) -> None:
        if self._is_first and kind in self._has_said:
            text = f"\n\n{text}"
        self._is_first = False
        self._has_said.add(kind)
        self._events.append(kind(text))

    def _end_message(self) -> None:
        body = "".join(self._body)
        self._body = []
        if self._header is None and self._recipient and not self._take_call(body):
            self._say(Reasoning if self._channel == "analysis" else Content, body)
        self._recipient = ""
        self._header = _START

    def _take_call(self, body: str) -> bool:
        name = self._recipient.removeprefix(_FUNCTIONS)
        if not self._tools or (name == self._recipient and name not in self._tools.parameters):
            return False  # the recipient is none of the functions
        try:
            self._events += self._call_events([call_of(name, body)])
        except NoCallError:
            return False
        return True
