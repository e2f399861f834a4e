"""Runs a model as the engine does: one request over a paged cache, module by module."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from transfuse.cache.groups import group_layers
from transfuse.cache.kv_cache import KVCache
from transfuse.layers.attention import attending_to, paged_attention_of
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.step_context import StepContext


def paged_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, V] of a prompt [1, T], after a forward that shows what is to be stored."""
    with paged_attention_of(model):
        probe = LayerProbe(model.config)
        _logits(model, ids, probe)
        groups = group_layers(probe.specs())
        kv = KVCache(probe.specs(), groups, num_blocks=1 + len(groups), block_size=ids.shape[1], dtype=model.dtype)
        return _logits(model, ids, PagedCache(kv, _context(ids, len(groups)), probe.layout()))


def _logits(model: PreTrainedModel, ids: torch.Tensor, cache: RaggedCache) -> torch.Tensor:
    name = ForwardArguments.of(type(model)).cache
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with torch.no_grad(), attending_to(cache):
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}).logits
    return logits


def _context(ids: torch.Tensor, num_groups: int) -> StepContext:
    """All of the prompt at once, in one block of each group."""
    num_tokens = ids.shape[1]
    row = torch.tensor([0, num_tokens], dtype=torch.int32)
    return StepContext(
        input_ids=ids[0],
        positions=torch.arange(num_tokens),
        num_tokens=num_tokens,
        cu_seqlens_q=row,
        seq_lens=row[1:],
        block_table=tuple(torch.tensor([[1 + group]], dtype=torch.int32) for group in range(num_groups)),
        slot_mapping=tuple((1 + group) * num_tokens + torch.arange(num_tokens) for group in range(num_groups)),
        logit_rows=torch.arange(num_tokens),
    )
