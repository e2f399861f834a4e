"""How a family of models writes calls, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfuse.text.replies.calls import Call
from transfuse.text.replies.scanners import Scanner
from transfuse.text.replies.tools import Tools, long_id


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What stands around the JSON of a call's arguments where a model is held to making calls.

    Attributes:
        before: given the tool's name.
        after: the rest of the call.
        between: parts two calls; None where there can be one only.
        first: stands before the first call.
        last: stands behind the last one.
    """

    before: Callable[[str], str]
    after: str
    between: str | None = None
    first: str = ""
    last: str = ""


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
        goes_on: brackets that begin a region behind another one only, such as the next object of a list.
        bare_scanner: finds the end of such a region, from its bracket on.
        new_id: makes the id of a call that has none.
        frame: how a call is written with its arguments as JSON; None where the family does not write them so.
    """

    read: Callable[[str, Tools], list[Call]]
    scanner: Callable[[], Scanner]
    openers: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: str = ""
    goes_on: str = ""
    bare_scanner: Callable[[], Scanner] | None = None
    new_id: Callable[[str, int], str] = long_id
    frame: CallFrame | None = None

    @property
    def frame_opener(self) -> str:
        """The marker that the frame begins with; empty where calls look like other text at first."""
        opening = "" if self.frame is None else self.frame.first or self.frame.before("")
        return next((marker for marker in self.openers + self.sections if opening.startswith(marker)), "")

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, which readers must see even where they are special tokens."""
        return self.openers + self.sections + self.closers + self.inner
