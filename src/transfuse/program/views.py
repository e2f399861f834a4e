"""The same elements seen with other dimensions, where sizes allow it in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transfuse.program.graph import View
from transfuse.program.sizes import ONE, ZERO, Size


class NotNative(Exception):
    """An operation is left to torch; the message says why."""


def squeezed(view: View) -> View:
    """Without the dimensions that are one in every step."""
    kept = [i for i, size in enumerate(view.sizes) if not size.is_number(1)]
    return replace(view, sizes=tuple(view.sizes[i] for i in kept), strides=tuple(view.strides[i] for i in kept))


def collapsed(views: Sequence[View]) -> list[View]:
    """The same views of equal sizes with as few dimensions as possible, the same for all."""
    sizes = list(views[0].sizes)
    strides = [list(view.strides) for view in views]
    dim = len(sizes) - 1
    while dim > 0:
        joined = sizes[dim - 1].times(sizes[dim])
        if joined is not None and all(s[dim].times(sizes[dim]) == s[dim - 1] for s in strides):
            sizes[dim - 1] = joined
            del sizes[dim]
            for s in strides:
                s[dim - 1] = s[dim]
                del s[dim]
        elif sizes[dim].is_number(1):
            del sizes[dim]
            for s in strides:
                del s[dim]
        dim -= 1
    if len(sizes) > 1 and sizes[0].is_number(1):
        del sizes[0]
        for s in strides:
            del s[0]
    return [replace(v, sizes=tuple(sizes), strides=tuple(s)) for v, s in zip(views, strides, strict=True)]


def as_rows(view: View) -> View:
    """As [rows, last dimension], the last one contiguous.

    Raises:
        NotNative: it cannot be seen so.
    """
    if not view.sizes:
        raise NotNative("a number is no row")
    if not view.strides[-1].is_number(1) and not view.sizes[-1].is_number(1):
        raise NotNative("the last dimension is not contiguous")
    lead = collapsed([replace(view, sizes=view.sizes[:-1], strides=view.strides[:-1])])[0] if view.sizes[:-1] else None
    if lead is None or not lead.sizes:
        return replace(view, sizes=(ONE, view.sizes[-1]), strides=(view.sizes[-1], ONE))
    if len(lead.sizes) > 1:
        raise NotNative("the rows are not evenly spaced")
    return replace(view, sizes=(lead.sizes[0], view.sizes[-1]), strides=(lead.strides[0], ONE))


def as_heads(view: View, *, heads_first: bool) -> View:
    """As [tokens, heads, dim] from [1, heads, tokens, dim] or [1, tokens, heads, dim].

    Raises:
        NotNative: it has more than one row, or its last dimension is not contiguous.
    """
    if len(view.sizes) == 4 and view.sizes[0].is_number(1):
        view = replace(view, sizes=view.sizes[1:], strides=view.strides[1:])
    if len(view.sizes) != 3 or not view.strides[2].is_number(1):
        raise NotNative("heads are not laid out as expected")
    if heads_first:
        (h, t, d), (sh, st, sd) = view.sizes, view.strides
        return replace(view, sizes=(t, h, d), strides=(st, sh, sd))
    return view


def broadcast(view: View, sizes: tuple[Size, ...]) -> View:
    """Repeated to these sizes, with strides of zero.

    Raises:
        NotNative: it does not fit.
    """
    missing = len(sizes) - len(view.sizes)
    if missing < 0:
        raise NotNative("more dimensions than the result")
    strides = [ZERO] * missing
    for size, stride, wanted in zip(view.sizes, view.strides, sizes[missing:], strict=True):
        if size == wanted:
            strides.append(stride)
        elif size.is_number(1):
            strides.append(ZERO)
        else:
            raise NotNative("sizes differ")
    return replace(view, sizes=sizes, strides=tuple(strides))


def same_elements(a: View, b: View) -> bool:
    """Whether two views are surely the same elements in the same order."""
    if a == b:
        return True
    if (a.buffer, a.dtype, a.offset) != (b.buffer, b.dtype, b.offset):
        return False
    a, b = collapsed([squeezed(a)])[0], collapsed([squeezed(b)])[0]
    return (a.sizes, a.strides) == (b.sizes, b.strides)


def disjoint(a: View, b: View) -> bool:
    """Whether two views surely share no element, in whatever step."""
    if a.buffer != b.buffer:
        return True
    return a.dtype == b.dtype and _apart(a, b)


def _apart(a: View, b: View) -> bool:
    end_a, end_b = _end(a), _end(b)
    if end_a is None or end_b is None:
        return False
    if b.offset.minus(end_a).least >= 1 or a.offset.minus(end_b).least >= 1:
        return True
    # Or one lies in the gaps of the other, as queries and keys do in rows that hold both.
    return any(_apart_in_rows(a, b, stride) for stride in a.strides if stride in b.strides and not stride.is_number(0))


def _apart_in_rows(a: View, b: View, stride: Size) -> bool:
    """Whether they are apart in one row of this stride, beyond which neither reaches."""
    a, b = _row(a, stride), _row(b, stride)
    end_a, end_b = _end(a), _end(b)
    if end_a is None or end_b is None:
        return False
    reach = end_a.minus(b.offset), end_b.minus(a.offset)
    return all(stride.minus(r).least >= 1 for r in reach) and _apart(a, b)


def _row(view: View, stride: Size) -> View:
    """Without the dimension of this stride."""
    dim = view.strides.index(stride)
    sizes, strides = list(view.sizes), list(view.strides)
    del sizes[dim], strides[dim]
    return replace(view, sizes=tuple(sizes), strides=tuple(strides))


def _end(view: View) -> Size | None:
    """Offset of the last element."""
    end = view.offset
    for size, stride in zip(view.sizes, view.strides, strict=True):
        reach = size.minus(ONE).times(stride)
        if reach is None:
            return None
        end = end + reach
    return end
