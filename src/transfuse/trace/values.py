"""What a recording keeps of the values that pass: tensors inside tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from transfuse.trace.graph import TensorFacts

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None))


class Constant:
    """An argument that is neither a tensor nor a plain value: a cache, a mask, a module."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def is_plain(value: Any) -> bool:
    """Whether a graph's node can hold a value as it is."""
    return isinstance(value, _PLAIN) or value is Ellipsis


def parts_of(value: Any) -> Iterator[tuple[Callable[[Any, Any], Any], Any, Any]]:
    """What a container holds, each part with the function and the key that take it out."""
    if isinstance(value, tuple | list):
        yield from ((operator.getitem, index, item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    elif is_record(value):
        yield from ((getattr, f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))


def is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not is_plain(value):
        for _, _, item in parts_of(value):
            yield from tensors_in(item)


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in a value."""
    return next(tensors_in(value), None) is not None


def facts_of(value: Any) -> Any:
    """A value with `TensorFacts` for its tensors, in tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return TensorFacts(tuple(value.shape), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(map(facts_of, value))
    if isinstance(value, dict) or is_record(value):
        return {key: facts_of(item) for _, key, item in parts_of(value)}
    return value if isinstance(value, bool | int | float | str) else None


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """How often each tensor, or what it is a view of, has been changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
