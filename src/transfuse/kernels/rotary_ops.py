"""Plain-torch kernels of rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import torch

from transfuse.kernels.fused_ops import fused_op

_SETTINGS = "bool interleaved=False, str angles='paired', bool inverse=False, int heads=1, bool gathered=False"


@fused_op(f"rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, {_SETTINGS}) -> (Tensor, Tensor)")
def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    angles: str = "paired",
    inverse: bool = False,
    heads: int = 1,
    gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn pairs of the first `R` of each head's `D` dimensions, in queries and keys; the others stay.

    Args:
        query: [B, num_heads, T, D].
        key: [B, num_kv_heads, T, D].
        cos: [B, T, R] or [T, R], or with a dimension of one where the heads are.
        sin: the same.
        interleaved: whether pairs are neighbours (2i, 2i + 1) rather than halves (i, i + R / 2).
        angles: how the angles of the pairs lie in `cos` and `sin`: `paired`, one for each dimension; `first`, as that,
            but only the first half counts; `single`, one for each pair, [..., R / 2].
        inverse: whether the turn is the other way round.
        heads: the dimension of the heads; 2 where `query` and `key` are [B, T, heads, D].
        gathered: whether neighbours end up in halves.
    """
    tables = _tables(query, cos, sin, interleaved, angles, inverse, heads, gathered)
    if query.dtype != key.dtype or query.dim() != key.dim() or query.shape[-1] != key.shape[-1]:
        return _turned(query, *tables, interleaved, gathered), _turned(key, *tables, interleaved, gathered)
    # As heads of one tensor they take half as many operations, which is a third of the time for few rows.
    both = _turned(torch.cat((query, key), dim=heads), *tables, interleaved, gathered)
    turned, turned_key = torch.split_with_sizes(both, [query.shape[heads], key.shape[heads]], dim=heads)
    return turned, turned_key


@fused_op(f"rotate(Tensor x, Tensor cos, Tensor sin, {_SETTINGS}) -> Tensor")
def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    angles: str = "paired",
    inverse: bool = False,
    heads: int = 1,
    gathered: bool = False,
) -> torch.Tensor:
    """What `rotary` does, to queries or keys alone."""
    return _turned(x, *_tables(x, cos, sin, interleaved, angles, inverse, heads, gathered), interleaved, gathered)


def _tables(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    angles: str,
    inverse: bool,
    heads: int,
    gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos` and `sin` with a number for each dimension that turns, of as many dimensions as `x`."""
    if angles != "paired":
        half = cos.shape[-1] if angles == "single" else cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        if interleaved and not gathered:
            cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if cos.dim() < x.dim():
        # Counted from the end, since rows that all requests share have no dimension for them.
        cos, sin = cos.unsqueeze(heads - x.dim()), sin.unsqueeze(heads - x.dim())
    return cos, -sin if inverse else sin


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, gathered: bool) -> torch.Tensor:
    size = cos.shape[-1]
    whole = size == x.shape[-1]
    part = x if whole else x[..., :size]
    if interleaved and gathered:
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if interleaved and not gathered:
        other = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-part[..., size // 2 :], part[..., : size // 2]), dim=-1)
    part = (part * cos + other * sin).to(x.dtype)
    return part if whole else torch.cat((part, x[..., size:]), dim=-1)
