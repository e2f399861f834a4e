"""Takes markers out of text that comes in pieces."""

from __future__ import annotations

from collections.abc import Collection

from transfuse.text.stop_strings import StopStringMatcher


class MarkerFilter:
    """Lets text through, but for markers.

    Attributes:
        markers: what is taken out.
    """

    def __init__(self, markers: Collection[str]) -> None:
        self.markers = tuple(markers)
        self._matcher = StopStringMatcher(tuple(markers)) if markers else None
        self._held = ""

    def feed(self, text: str) -> str:
        """What is certain to be text."""
        if self._matcher is None:
            return text
        passed = ""
        while (match := self._matcher.read(text)) is not None:
            known, self._held = self._held + text[: match.end], ""
            passed += known[: len(known) - len(match.stop)]
            text = text[match.end :]
            self._matcher.restart()
        known = self._held + text
        cut = len(known) - self._matcher.num_held
        self._held = known[cut:]
        return passed + known[:cut]

    def finish(self) -> str:
        """What was held back; another text may follow."""
        held, self._held = self._held, ""
        if self._matcher is not None:
            self._matcher.restart()
        return held
