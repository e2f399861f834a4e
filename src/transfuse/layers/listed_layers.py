"""What `Cache.layers` shows in a ragged batch: which layers have memory, and nothing of what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from transfuse.errors import UnsupportedModelError


def _refuse(what: str, name: str) -> NoReturn:
    # Dunder look-ups (copy, pickle) are questions of the interpreter, not of the model.
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedModelError(f"the model's code reads .{name} of {what}, which has no meaning in a ragged batch")


class SomeNumber:
    """A number of which only this much is known: it is above zero."""

    def __bool__(self) -> bool:
        return True

    def __gt__(self, other: object) -> bool:
        if other == 0:
            return True
        _refuse(f"the size of a cache layer, compared with {other!r},", "numel")

    def __eq__(self, other: object) -> bool:
        if other == 0:
            return False
        _refuse(f"the size of a cache layer, compared with {other!r},", "numel")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("the size of a cache layer", name)


class Memory:
    """Stands for the tensor that a layer keeps keys or values in: it has a size, and cannot be read."""

    def numel(self) -> SomeNumber:
        """More than none."""
        return SomeNumber()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("keys or values in Cache.layers", name)


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """A layer as `Cache.layers` shows it.

    Attributes:
        is_initialized: whether it has memory. As of a static cache, that says nothing of how much is in it.
    """

    is_initialized: bool

    @property
    def keys(self) -> Memory | None:
        """Where keys are kept, if anywhere."""
        return Memory() if self.is_initialized else None

    @property
    def values(self) -> Memory | None:
        """Where values are kept, if anywhere."""
        return Memory() if self.is_initialized else None

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("one of Cache.layers", name)
