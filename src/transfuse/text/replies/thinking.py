"""Parts a reply into the reasoning that it begins with, and the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transfuse.text.replies.grammars import ReplyGrammar
from transfuse.text.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class ThinkingSyntax:
    """The markers around reasoning.

    Attributes:
        opener: begins it, unless the prompt has.
        closer: ends it.
        always: whether replies begin with reasoning although nothing opens it.
    """

    opener: str
    closer: str
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Both of them."""
        return self.opener, self.closer

    def rules(self, prompt: str, grammar: ReplyGrammar) -> str:
        """The reasoning of a reply to the prompt, as a term of its grammar; empty where there is none."""
        end = prompt.rstrip()
        if end.endswith(self.closer):
            return ""
        thought = grammar.until("thought", self.closer)
        grammar.add("SPACE: /\\s{0,4}/")
        if self.is_open(prompt):
            return f"{thought} SPACE"
        grammar.add(f"thinking: {grammar.terms(self.opener)} {thought} SPACE")
        return "thinking?"

    def is_open(self, prompt: str) -> bool:
        """Whether a reply to the prompt, laid out as text, begins within reasoning."""
        end = prompt.rstrip()
        if end.endswith(self.opener):
            return True
        return self.always and not end.endswith(self.closer)


class ThinkingSplitter:
    """Reasoning is what stands between the markers where the reply begins; later ones are text like any other.

    White space around it belongs to neither side.

    Args:
        syntax: the markers.
        is_open: whether the prompt has opened it.
        hidden: markers that are special tokens, which users never see.
    """

    def __init__(self, syntax: ThinkingSyntax, *, is_open: bool, hidden: Collection[str] = ()) -> None:
        self._syntax = syntax
        self._matcher = StopStringMatcher(tuple(dict.fromkeys((syntax.closer, *hidden))))
        self._may_open = True
        self._held = ""  # may become a marker, or white space that ends the reasoning
        self._has_begun = False
        self._trims = False
        self.in_reasoning = is_open

    def feed(self, text: str) -> tuple[str, str]:
        """Read on: more reasoning, and more of the rest."""
        reasoning = ""
        if self._may_open:
            text, self._held = self._held + text, ""
            start = text.lstrip()
            if start.startswith(self._syntax.opener):  # the model may repeat what the prompt ends with
                self.in_reasoning = True
                text = start[len(self._syntax.opener) :]
            elif self._syntax.opener.startswith(start):
                self._held = text
                return "", ""
            self._may_open = False
        if self.in_reasoning:
            reasoning, text = self._read(text)
        return reasoning, self._trimmed(text)

    def _read(self, text: str) -> tuple[str, str]:
        reasoning = ""
        while self.in_reasoning:
            match = self._matcher.read(text)
            known = self._held + text
            if match is None:
                end = len(known[: len(known) - self._matcher.num_held].rstrip())
                self._held = known[end:]
                return reasoning + self._begun(known[:end]), ""
            end = len(self._held) + match.end
            self._matcher.restart()
            before, text = known[: end - len(match.stop)], known[end:]
            self._held = before if match.stop != self._syntax.closer else ""
            if match.stop == self._syntax.closer:
                self.in_reasoning, self._trims = False, True
                reasoning += self._begun(before.rstrip())
        return reasoning, text

    def _begun(self, text: str) -> str:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return text

    def _trimmed(self, text: str) -> str:
        """Without the white space that parts the rest from the reasoning."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def finish(self) -> tuple[str, str]:
        """What was held back, as the one or the other."""
        held, self._held = self._held, ""
        if self.in_reasoning:
            return self._begun(held), ""
        return "", held
