"""Makes the class that a module takes on when its forward is rewritten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def fused_class(cls: type[nn.Module], forward: Callable[..., Any], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """A subclass with another forward, under the same name: some code tells classes, and saves models, by name.

    Args:
        cls: the class that the module has.
        forward: the rewritten one.
        attributes: what that reads of `self` besides what the module has.
    """
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "__transfuse_original__": cls,
        **attributes,
        "forward": forward,
    }
    if not hasattr(cls, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy
    return type(cls.__name__, (cls,), body)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a fused one was made from; any other, itself."""
    found: type[nn.Module] = vars(cls).get("__transfuse_original__", cls)
    return found


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """A pickle holds a module of the original class, which whoever reads it can import."""
    cls = type(self)
    reduced: Any = super(cls, self).__reduce_ex__(protocol)
    make, arguments, *state = reduced
    if make.__name__ == "__newobj__":  # which insists on the object's own class
        make = object.__new__
    return make, tuple(original_class(cls) if argument is cls else argument for argument in arguments), *state


def _deepcopy(self: _Module, memo: dict[int, Any]) -> _Module:
    """A copy is fused too."""
    twin = type(self).__new__(type(self))
    memo[id(self)] = twin
    read: Callable[[], Any] = self.__getstate__
    write: Callable[[Any], None] = twin.__setstate__
    write(copy.deepcopy(read(), memo))
    return twin
