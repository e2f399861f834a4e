"""How a family of models writes calls, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfuse.text.replies.calls import Call
from transfuse.text.replies.scanners import Scanner
from transfuse.text.replies.tools import Tools, long_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls are written: regions that begin with a marker, or with a bracket where text begins.

    Attributes:
        read: the calls in a region, given what follows its opener, and the tools; it raises `NoCallError` where it
            holds none, a broken one, or not all of one.
        scanner: finds the end of a region with an opener, from behind that on.
        openers: markers that begin a region.
        sections: markers that begin a row of regions, and say nothing by themselves.
        closers: markers that may follow a region or a row of them, and say nothing by themselves.
        inner: markers within regions.
        bare: brackets that begin a region where the reply's text begins, or behind another region.
        bare_scanner: finds the end of such a region, from its bracket on.
        new_id: makes the id of a call that has none.
    """

    read: Callable[[str, Tools], list[Call]]
    scanner: Callable[[], Scanner]
    openers: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: str = ""
    bare_scanner: Callable[[], Scanner] | None = None
    new_id: Callable[[str, int], str] = long_id

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, which readers must see even where they are special tokens."""
        return self.openers + self.sections + self.closers + self.inner
