"""Which parts of one tensor two nodes are."""

from __future__ import annotations

from typing import Any

from torch import fx

from transfuse.fusion.query import op
from transfuse.trace.graph import TensorFacts, value_of


def halves_of(first: Any, second: Any) -> tuple[fx.Node, str] | None:
    """The tensor of which two nodes are the halves along the last dimension, and how they lie in it.

    Returns:
        The tensor with `halves` (the first node first), `swapped` or `interleaved`; None where they are something else.
    """
    one, other = _part(first), _part(second)
    if one is None or other is None or one[0] is not other[0]:
        return None
    facts = value_of(one[0])
    if not isinstance(facts, TensorFacts):
        return None
    size = facts.shape[-1]
    ranges = (range(size)[one[1]], range(size)[other[1]])
    low, high = range(size // 2), range(size // 2, size)
    layouts = {"halves": (low, high), "swapped": (high, low), "interleaved": (range(0, size, 2), range(1, size, 2))}
    found = next((name for name, pair in layouts.items() if pair == ranges), None)
    return None if size % 2 or found is None else (one[0], found)


def _part(node: Any) -> tuple[fx.Node, slice] | None:
    """The tensor that a node is a part of along its last dimension, and which part."""
    if op(node) == "narrow":
        start, length = node.args[2:4]
        return (node.args[0], slice(start, start + length)) if _is_last(node.args[1], node) else None
    if op(node) != "getitem":
        return None
    source, index = node.args
    if isinstance(index, int) and op(source) in ("chunk", "split", "tensor_split"):
        return _piece(source, index)
    is_sliced = isinstance(index, tuple) and isinstance(index[-1], slice) and _takes_all(index[:-1], source)
    return (source, index[-1]) if is_sliced else None


def _piece(split: fx.Node, index: int) -> tuple[fx.Node, slice] | None:
    """One of the results of `split` or `chunk`."""
    dim = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    pieces: Any = value_of(split)
    if not isinstance(dim, int) or not _is_last(dim, split.args[0]) or not isinstance(pieces, tuple):
        return None
    sizes = [piece.shape[-1] for piece in pieces]
    start = sum(sizes[:index])
    source: Any = split.args[0]
    return source, slice(start, start + sizes[index])


def _is_last(dim: Any, node: Any) -> bool:
    facts = value_of(node)
    return isinstance(facts, TensorFacts) and dim in (-1, len(facts.shape) - 1)


def _takes_all(index: tuple[Any, ...], source: Any) -> bool:
    """Whether an index leaves all dimensions before the last as they are."""
    facts = value_of(source)
    whole = all(part == slice(None) for part in index if part is not Ellipsis)
    return whole and isinstance(facts, TensorFacts) and (Ellipsis in index or len(index) == len(facts.shape) - 1)
