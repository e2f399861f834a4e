"""Attention within each text of a packed row, without a cache: for encoders, and for decoders that only embed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from transfuse.kernels.torch_ops import executions

# Where a window or a formula asks for a mask or for scores, so many queries are computed at once.
_QUERIES_AT_ONCE = 512

_library = torch.library.Library("transfuse", "FRAGMENT")
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scale, int behind, int ahead, "
    "float softcap, Tensor? sinks, Tensor(a!) out) -> ()"
)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    behind: int,
    ahead: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of each text's tokens to that text.

    Args:
        query: [T, num_heads, head_dim].
        key: [T, num_kv_heads, head_dim].
        value: [T, num_kv_heads, value_head_dim].
        cu_seqlens: i32 [R + 1], where each text starts; the last is T. Neighbours of one length are computed together.
        scale: factor on the scores.
        behind: earlier tokens that a token sees; -1 for all.
        ahead: later tokens that a token sees; -1 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        sinks: [num_heads], a logit per head that joins the softmax and attends to nothing; None for none.
        out: [T, num_heads, value_head_dim], written.
    """
    executions["packed_attention"] += 1
    for start, count, length in _runs(cu_seqlens.tolist()):
        rows = slice(start, start + count * length)
        q, k, v = (_by_head(x[rows], count, length) for x in (query, key, value))
        result = _by_head(out[rows], count, length)
        if softcap or sinks is not None or (behind, ahead) not in ((-1, -1), (-1, 0)):
            for first in range(0, length, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, length)
                low = 0 if behind < 0 else max(0, first - behind)
                high = length if ahead < 0 else min(length, last + ahead)
                mask = _visible(first, last, low, high, behind, ahead)
                keys, values = k[:, :, low:high], v[:, :, low:high]
                if softcap or sinks is not None:
                    found = _by_formula(q[:, :, first:last], keys, values, mask, scale, softcap, sinks)
                else:
                    found = _by_torch(q[:, :, first:last], keys, values, scale, mask=mask)
                result[:, :, first:last].copy_(found)
        else:
            result.copy_(_by_torch(q, k, v, scale, is_causal=ahead == 0))


def _runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """First row, number and length of texts of one length that lie side by side."""
    begin, count, length = 0, 0, 0
    for start, stop in pairwise(starts):
        if count and stop - start == length:
            count += 1
            continue
        if count:
            yield begin, count, length
        begin, count, length = start, 1, stop - start
    if count:
        yield begin, count, length


def _by_head(rows: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """[count, heads, length, dim] of [count * length, heads, dim]."""
    return rows.view(count, length, *rows.shape[1:]).transpose(1, 2)


def _visible(first: int, last: int, low: int, high: int, behind: int, ahead: int) -> torch.Tensor:
    """Which of the keys from `low` on the queries from `first` on see, bool [last - first, high - low]."""
    distance = torch.arange(low, high) - torch.arange(first, last).unsqueeze(1)
    sees = torch.ones_like(distance, dtype=torch.bool)
    if behind >= 0:
        sees &= distance >= -behind
    if ahead >= 0:
        sees &= distance <= ahead
    return sees


def _by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    found: torch.Tensor = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found


def _by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out in float32, for what torch's own kernel cannot express."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.float() * scale) @ k.transpose(-1, -2)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return weights @ v


_library.impl("packed_attention", packed_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("transfuse::packed_attention", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""
