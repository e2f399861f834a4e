"""Transformers' attention interface, answered by the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from transfuse.errors import UnsupportedModelError
from transfuse.layers.apart import attend_alone, runs_alone
from transfuse.layers.configs import implementation_of
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.ragged_mask import ForeignMask, RaggedMask, ragged_mask

ATTENTION_NAME = "transfuse_paged"

# Arguments that do not change what attention computes here: what they carry is known otherwise, or concerns training.
INERT_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"cache", "past_key_values", "past_key_value", "logits_to_keep", "layer_idx", "position_embeddings"}
)
_active: ContextVar[RaggedCache] = ContextVar("transfuse_active_cache")


@contextmanager
def attending_to(cache: RaggedCache) -> Iterator[RaggedCache]:
    """Within it, attention layers of ragged models read `cache`."""
    token = _active.set(cache)
    try:
        yield cache
    finally:
        _active.reset(token)
        cache.forget_keys()


@contextmanager
def paged_attention_of(model: nn.Module) -> Iterator[None]:
    """Within it, the attention layers of `model` go to the paged cache."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)
    with implementation_of(model, "_attn_implementation", ATTENTION_NAME):
        yield


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask | ForeignMask | torch.Tensor | None,
    *args: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sliding_window: int | None = None,
    latent_weight: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a ragged row over the paged cache, as Transformers calls it.

    Args:
        module: the attention layer that calls.
        query: [1, num_heads, T, head_dim].
        key: what the cache's `update` returned; names the cache layer.
        value: [1, num_kv_heads, T, value_head_dim]; with `latent_weight`, the part of the keys that heads share.
        attention_mask: from `ragged_mask`; it alone decides the window, as it does for the original. In a layer that
            runs on one request, a tensor.
        args: refused; the interface passes everything else by name.
        scaling: factor on the scores; None for 1 / sqrt(head_dim).
        dropout: must be 0.
        is_causal: must not be False.
        softcap: see `kernels.torch_ops.paged_attention`.
        s_aux: sinks, under the name that flash attention kernels use.
        sinks: sinks, [num_heads].
        sliding_window: ignored in favour of the mask.
        latent_weight: makes keys and values of the latents that `key` are, see `kernels.mla_ops.latent_attention`;
            rewritten forwards give it. None where keys and values are what they are.
        kwargs: refused unless known to be inert.

    Returns:
        [1, T, num_heads, value_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: an argument would change the result and is not implemented.
    """
    unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in INERT_ARGUMENTS)
    name = type(module).__name__
    if args or unknown:
        raise UnsupportedModelError(f"{name} passes {', '.join(unknown) or 'positional arguments'} to attention")
    if isinstance(attention_mask, torch.Tensor) and runs_alone() and not dropout:
        if softcap is not None or sinks is not None or s_aux is not None or latent_weight is not None:
            raise UnsupportedModelError(f"{name} gives more than a mask to attention that runs on one request")
        return attend_alone(query, key, value, attention_mask, scaling), None
    if isinstance(attention_mask, ForeignMask):
        attention_mask.refuse()
    if not isinstance(attention_mask, RaggedMask):
        given = "no mask" if attention_mask is None else "a mask of its own"
        raise UnsupportedModelError(f"{name} gives attention {given}")
    if dropout or is_causal is False:
        raise UnsupportedModelError(f"{name} asks for {'dropout' if dropout else 'attention that is not causal'}")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(f"{name} queries have shape {tuple(query.shape)}, keys {tuple(key.shape)}")
    cache, sinks = _active.get(), s_aux if sinks is None else sinks
    layer, rows = cache.layer_of(key, value), query[0].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if latent_weight is None:
        result = cache.attend(
            layer,
            rows,
            attention_mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            value_head_dim=value.shape[-1],
        )
    elif sinks is None:
        result = cache.attend_latent(layer, rows, attention_mask, latent_weight, scale=scale, softcap=softcap)
    else:
        raise UnsupportedModelError(f"{name} gives sinks to attention over latents")
    return result.unsqueeze(0), None
