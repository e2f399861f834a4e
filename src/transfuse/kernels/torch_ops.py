"""Plain-torch kernels of the paged cache: the reference that faster ones are compared with, and what runs without them.

Both ops are registered with torch (`torch.ops.transfuse.*`), write into tensors that the caller provides, and count
their executions in `executions`.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch

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
    block_size = key_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache.transpose(1, 2)[block, offset] = key[:num_tokens]
    value_cache.transpose(1, 2)[block, offset] = value[:num_tokens]


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
    """Causal attention of a ragged batch over the paged cache, computed in float32.

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
    starts = cu_seqlens_q.tolist()
    query_lens = tuple(b - a for a, b in pairwise(starts))
    pieces = plan_attention(query_lens, tuple(seq_lens.tolist()), window, key_cache.shape[2], query.shape[1])
    scaled = query.float() * scale
    for piece in pieces:
        first, last = piece.query_rows
        blocks = block_table[piece.requests, piece.blocks[0] : piece.blocks[1]]
        keys, values = _gather(key_cache, blocks), _gather(value_cache, blocks)
        _attend(scaled[first:last], keys, values, piece, softcap, sinks, out[first:last])
    out[starts[-1] :] = 0


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The tokens of `blocks` [r, n] as float32 [r, num_kv_heads, n * block_size, dim].

    A block's heads lie one after another, so that the cache is a matrix with a row per block and head, and one
    gather brings each head's tokens together.
    """
    _, num_heads, block_size, dim = cache.shape
    rows_per_block = cache.stride(0) // cache.stride(1)
    num_rows = (cache.shape[0] - 1) * rows_per_block + num_heads
    rows = cache.as_strided((num_rows, block_size * dim), (block_size * dim, 1))
    index = blocks.unsqueeze(1) * rows_per_block + torch.arange(num_heads, dtype=blocks.dtype).view(1, -1, 1)
    gathered = rows.index_select(0, index.reshape(-1))
    return gathered.view(blocks.shape[0], num_heads, blocks.shape[1] * block_size, dim).float()


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: Piece,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_requests, num_kv_heads, num_keys, dim = keys.shape
    num_queries, num_heads = piece.num_queries, query.shape[1]
    groups = num_heads // num_kv_heads
    # The query heads that share a key head become rows of one product, so that keys are never repeated.
    rows = query.reshape(num_requests, num_queries, num_kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    scores = rows.reshape(num_requests, num_kv_heads, groups * num_queries, dim) @ keys.transpose(-1, -2)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(num_requests, num_kv_heads, groups, num_queries, num_keys)
    scores += piece.mask
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    result = weights.reshape(num_requests, num_kv_heads, groups * num_queries, num_keys) @ values
    result = result.view(num_requests, num_kv_heads, groups, num_queries, -1).permute(0, 3, 1, 2, 4)
    out.copy_(result.reshape(out.shape))


_library.impl("write_kv", write_kv, "CompositeExplicitAutograd")
_library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("transfuse::write_kv", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""


@torch.library.register_fake("transfuse::paged_attention", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""
