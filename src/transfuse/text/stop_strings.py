"""Finds stop strings in text that arrives in pieces, one character at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found.

    Attributes:
        stop: the string.
        end: how many characters of the piece that was read last end with it.
    """

    stop: str
    end: int


class StopStringMatcher:
    """An Aho-Corasick automaton over the stop strings (https://doi.org/10.1145/360825.360855).

    The first string to be complete wins, and of those that end at the same character the longest: the only rule that
    needs no look ahead and does not depend on how the text was cut into pieces.

    Args:
        stops: strings, none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Per state: next state by character; where to go on when none fits; how much text may yet become a stop
        # string; the longest stop string that ends here.
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self._held: list[int] = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._held.append(self._held[state] + 1)
                self._stop.append(None)
            state = self._next[state][char]
        self._stop[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            if self._stop[state] is None:
                self._stop[state] = self._stop[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(fallback, char)
                queue.append(child)
            if not self._next[state]:
                # A whole stop string that starts no longer one: nothing that follows can extend it.
                self._held[state] = self._held[fallback]

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        return self._held[self._state]

    def restart(self) -> None:
        """Forget what was read."""
        self._state = 0

    def read(self, text: str) -> StopMatch | None:
        """Reads on, up to the end of the first stop string; what follows it is not read.

        Reading may go on after a match, as if it had not been one.
        """
        for offset, char in enumerate(text, 1):
            self._state = self._step(self._state, char)
            stop = self._stop[self._state]
            if stop is not None:
                return StopMatch(stop, offset)
        return None
