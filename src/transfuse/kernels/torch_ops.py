"""Plain-torch kernels of the paged cache: the reference that faster ones are compared with, and what runs without them.

Both ops are registered with torch (`torch.ops.transfuse.*`), write into tensors that the caller provides, and count
their executions in `executions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from transfuse.kernels.attention_plan import Piece, plan_attention

executions: Counter[str] = Counter()

_library = torch.library.Library("transfuse", "DEF")
_library.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()"
)
_library.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor seq_lens, float scale, int window, float softcap, Tensor? sinks, Tensor(a!) out) -> ()"
)


class Slots:
    """A step's slots as block and offset, which every layer of a cache group needs."""

    def __init__(self, slot_mapping: torch.Tensor, block_size: int) -> None:
        self.block = slot_mapping // block_size
        self.offset = slot_mapping % block_size


class Gathers:
    """A step's pieces with the rows of the cache that each gathers, which every layer of a cache group needs."""

    def __init__(
        self,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        window: int,
        num_heads: int,
        key_layout: tuple[int, int, int],
        value_layout: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        starts = cu_seqlens_q.tolist()
        self.num_rows: int = starts[-1]
        query_lens = tuple(b - a for a, b in pairwise(starts))
        block_size = key_layout[2]
        self.pieces: list[tuple[Piece, torch.Tensor, torch.Tensor]] = []
        for piece in plan_attention(query_lens, seq_lens.tolist(), window, block_size, num_heads, dtype):
            blocks = block_table[piece.requests, piece.blocks[0] : piece.blocks[1]].long()
            keys = _gathered_rows(blocks, key_layout)
            values = keys if value_layout == key_layout else _gathered_rows(blocks, value_layout)
            self.pieces.append((piece, keys, values))


def layout_of(cache: torch.Tensor) -> tuple[int, int, int]:
    """Rows per block, heads and tokens per block, where a row is a block of one head."""
    return cache.stride(0) // cache.stride(1), cache.shape[1], cache.shape[2]


def _gathered_rows(blocks: torch.Tensor, layout: tuple[int, int, int]) -> torch.Tensor:
    """Rows [r * num_heads * n] of a cache that bring each head's tokens of `blocks` [r, n] together."""
    rows_per_block, num_heads, _ = layout
    return (blocks.unsqueeze(1) * rows_per_block + torch.arange(num_heads).view(1, -1, 1)).reshape(-1)


_Made = TypeVar("_Made")


class _StepMemo:
    """Keeps what was derived from a step's tensors for the other layers of the step.

    Tensors are told apart by identity: a step's tensors are made once and not modified. They are held on to, so that
    no other can take their place.
    """

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None
        self._made: dict[tuple[object, ...], tuple[tuple[torch.Tensor, ...], Any]] = {}

    def get(
        self,
        step: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        settings: tuple[object, ...],
        make: Callable[..., _Made],
    ) -> _Made:
        """What `make` gives for these arguments; `step` is a tensor that all layers of one step have in common."""
        if step is not self._step:
            # Masks of long chunks are large: none outlives its step by more than the time to the next.
            self._made.clear()
            self._step = step
        key = (*map(id, tensors), *settings)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (tensors, make(*tensors, *settings))
        made: _Made = found[1]
        return made


step_slots, step_gathers = _StepMemo(), _StepMemo()


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store new keys and values in their slots.

    Args:
        key: [T, num_kv_heads, head_dim].
        value: [T, num_kv_heads, value_head_dim].
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], written.
        value_cache: [num_blocks, num_kv_heads, block_size, value_head_dim], written.
        slot_mapping: i64 [n], n <= T: block * block_size + offset of each token. Rows of `key` from n on are padding.
    """
    executions["write_kv.torch"] += 1
    num_tokens = slot_mapping.shape[0]
    slots = step_slots.get(slot_mapping, (slot_mapping,), (key_cache.shape[2],), Slots)
    key_cache.transpose(1, 2)[slots.block, slots.offset] = key[:num_tokens]
    value_cache.transpose(1, 2)[slots.block, slots.offset] = value[:num_tokens]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of a ragged batch over the paged cache.

    Args:
        query: [T, num_heads, head_dim]; rows from `cu_seqlens_q[-1]` on are padding.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: [num_blocks, num_kv_heads, block_size, value_head_dim].
        block_table: i32 [R, max_blocks].
        cu_seqlens_q: i32 [R + 1], where each request's queries start. Requests with a single query come first.
        seq_lens: i32 [R], tokens of each request with the new ones.
        scale: factor on the scores.
        window: tokens that a query sees, itself included; 0 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none (https://arxiv.org/abs/2408.00118).
        sinks: [num_heads], a logit per head that joins the softmax and attends to nothing
            (https://arxiv.org/abs/2309.17453); None for none.
        out: [T, num_heads, value_head_dim], written; padding rows become zero.
    """
    executions["paged_attention.torch"] += 1
    settings = (window, query.shape[1], layout_of(key_cache), layout_of(value_cache), query.dtype)
    gathers = step_gathers.get(cu_seqlens_q, (block_table, cu_seqlens_q, seq_lens), settings, Gathers)
    for piece, key_rows, value_rows in gathers.pieces:
        first, last = piece.query_rows
        keys, values = gather(key_cache, key_rows, piece), gather(value_cache, value_rows, piece)
        if softcap or sinks is not None:
            _attend_by_formula(query[first:last], keys, values, piece, scale, softcap, sinks, out[first:last])
        else:
            _attend(query[first:last], keys, values, piece, scale, out[first:last])
    if gathers.num_rows < out.shape[0]:
        out[gathers.num_rows :].zero_()


def gather(cache: torch.Tensor, rows: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The tokens that a piece sees, [r, num_kv_heads, L, dim]."""
    num_blocks, num_heads, block_size, dim = cache.shape
    row = block_size * dim
    num_rows = (num_blocks - 1) * (cache.stride(0) // row) + num_heads
    gathered = cache.as_strided((num_rows, row), (row, 1)).index_select(0, rows)
    return gathered.view(len(piece.requests), num_heads, -1, dim)[:, :, piece.tokens[0] : piece.tokens[1]]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: Piece, scale: float, out: torch.Tensor
) -> None:
    """Attention by torch's own kernel.

    The query heads that share a key head become its queries where each request has one query, and heads over one
    expanded key head elsewhere, so that keys are never repeated in memory.
    """
    num_requests, num_kv_heads, _, dim = keys.shape
    groups = query.shape[1] // num_kv_heads
    if piece.num_queries == 1:
        rows = query.view(num_requests, num_kv_heads, groups, dim)
        result = scaled_dot_product_attention(rows, keys, values, attn_mask=piece.mask, scale=scale)
        out.view(num_requests, num_kv_heads, groups, -1).copy_(result)
        return
    rows = query.view(piece.num_queries, num_kv_heads, groups, dim).permute(1, 2, 0, 3)
    keys = keys[0].unsqueeze(1).expand(-1, groups, -1, -1)
    values = values[0].unsqueeze(1).expand(-1, groups, -1, -1)
    result = scaled_dot_product_attention(rows, keys, values, attn_mask=piece.mask, scale=scale)
    out.view(piece.num_queries, num_kv_heads, groups, -1).copy_(result.permute(2, 0, 1, 3))


def _attend_by_formula(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: Piece,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention written out in float32, for what torch's own kernel cannot express."""
    num_requests, num_kv_heads, _, dim = keys.shape
    num_queries, groups = piece.num_queries, query.shape[1] // num_kv_heads
    rows = query.float().mul(scale).view(num_requests, num_queries, num_kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    scores = rows @ keys.float().transpose(-1, -2).unsqueeze(2)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if piece.mask is not None:
        scores += piece.mask.float().unsqueeze(1)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, groups, 1, 1).expand(num_requests, -1, -1, num_queries, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    result = weights @ values.float().unsqueeze(2)
    out.view(num_requests, num_queries, num_kv_heads, groups, -1).copy_(result.permute(0, 3, 1, 2, 4))


_library.impl("write_kv", write_kv, "CompositeExplicitAutograd")
_library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("transfuse::write_kv", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""


@torch.library.register_fake("transfuse::paged_attention", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""
