"""Plain-torch kernels of multi-head latent attention (https://arxiv.org/abs/2405.04434) over a cache of latents.

Of each token the cache keeps a latent, from which a weight makes the keys and values of all heads, and a part of the
keys that all heads share. The weight is taken to the queries and to the result instead, so that nothing is expanded:
every head's queries look at one and the same row.
"""

from __future__ import annotations

import torch

from transfuse.kernels.attention_plan import Piece
from transfuse.kernels.torch_ops import Gathers, Slots, executions, gather, layout_of, step_gathers, step_slots

_library = torch.library.Library("transfuse", "FRAGMENT")
_library.define("write_latent(Tensor latent, Tensor shared, Tensor(a!) cache, Tensor slot_mapping) -> ()")
_library.define(
    "latent_attention(Tensor query, Tensor cache, Tensor weight, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor seq_lens, float scale, int window, float softcap) -> Tensor"
)


def write_latent(latent: torch.Tensor, shared: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store new tokens in their slots, the latent before the shared part of the key.

    Args:
        latent: [T, 1, rank].
        shared: [T, 1, shared_dim].
        cache: [num_blocks, 1, block_size, rank + shared_dim], written.
        slot_mapping: i64 [n], n <= T: block * block_size + offset of each token. Rows from n on are padding.
    """
    executions["write_latent.torch"] += 1
    num_tokens, rank = slot_mapping.shape[0], latent.shape[-1]
    slots = step_slots.get(slot_mapping, (slot_mapping,), (cache.shape[2],), Slots)
    rows = cache[:, 0]
    rows[..., :rank][slots.block, slots.offset] = latent[:num_tokens, 0]
    rows[..., rank:][slots.block, slots.offset] = shared[:num_tokens, 0]


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of a ragged batch over the latents in a paged cache.

    A head's keys are `[weight_k @ latent, shared]` and its values `weight_v @ latent`, where `weight_k` [own_dim, rank]
    and `weight_v` [value_head_dim, rank] follow one another in the head's rows of `weight`. All
    is computed in float32.

    Args:
        query: [T, num_heads, own_dim + shared_dim]; rows from `cu_seqlens_q[-1]` on are padding.
        cache: [num_blocks, 1, block_size, rank + shared_dim], see `write_latent`.
        weight: [num_heads * (own_dim + value_head_dim), rank].
        block_table: i32 [R, max_blocks].
        cu_seqlens_q: i32 [R + 1], where each request's queries start. Requests with a single query come first.
        seq_lens: i32 [R], tokens of each request with the new ones.
        scale: factor on the scores.
        window: tokens that a query sees, itself included; 0 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.

    Returns:
        [T, num_heads, value_head_dim]; padding rows are zero.
    """
    executions["latent_attention"] += 1
    num_rows, num_heads, _ = query.shape
    rank = weight.shape[1]
    own_dim = query.shape[2] + rank - cache.shape[3]
    # Rounded once, at the end: a rounded query and rounded sums of latents would be further off than the original.
    by_head, wide = weight.view(num_heads, -1, rank).float(), query.float()
    moved = torch.matmul(wide[..., :own_dim].transpose(0, 1), by_head[:, :own_dim]).transpose(0, 1)
    absorbed = torch.cat((moved, wide[..., own_dim:]), dim=-1).mul_(scale)
    mixed = wide.new_zeros(num_rows, num_heads, rank)
    layout = layout_of(cache)
    settings = (window, num_heads, layout, layout, query.dtype)
    gathers = step_gathers.get(cu_seqlens_q, (block_table, cu_seqlens_q, seq_lens), settings, Gathers)
    for piece, rows, _ in gathers.pieces:
        first, last = piece.query_rows
        _attend(absorbed[first:last], gather(cache, rows, piece), piece, softcap, mixed[first:last])
    values = torch.matmul(mixed.transpose(0, 1), by_head[:, own_dim:].transpose(1, 2))
    return values.transpose(0, 1).to(query.dtype).contiguous()


def _attend(query: torch.Tensor, keys: torch.Tensor, piece: Piece, softcap: float, out: torch.Tensor) -> None:
    """Mix the latents of a piece: all heads' queries are rows of one product, since they share their keys.

    Args:
        query: f32 [r * q, num_heads, dim], scaled.
        keys: [r, 1, L, dim], the latents first.
        piece: which they are.
        softcap: see `latent_attention`.
        out: f32 [r * q, num_heads, rank], written.
    """
    num_requests, _, num_keys, dim = keys.shape
    num_queries, num_heads, rank = piece.num_queries, query.shape[1], out.shape[-1]
    wide = keys[:, 0].float()
    scores = query.view(num_requests, num_queries * num_heads, dim) @ wide.transpose(1, 2)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if piece.mask is not None:
        scores.view(num_requests, num_queries, num_heads, num_keys).add_(piece.mask.transpose(1, 2))
    out.view(num_requests, num_queries * num_heads, rank).copy_(scores.softmax(-1) @ wide[..., :rank])


_library.impl("write_latent", write_latent, "CompositeExplicitAutograd")
_library.impl("latent_attention", latent_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("transfuse::write_latent", lib=_library)
def _(*_: object) -> None:
    """Nothing to infer: the op only writes into its arguments."""


@torch.library.register_fake("transfuse::latent_attention", lib=_library)
def _(query: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    num_rows, num_heads, dim = query.shape
    own_dim = dim + weight.shape[1] - cache.shape[3]
    return query.new_empty(num_rows, num_heads, weight.shape[0] // num_heads - own_dim)
