"""Runs a model on `meta` with what its server provides, attention and caches, as single nodes of the recording."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from transfuse.layers.attention import attending_to, paged_attention_forward
from transfuse.layers.configs import implementation_of
from transfuse.layers.experts import fused_experts_of
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.packed_attention import packed_attention_forward, packed_mask
from transfuse.layers.packed_row import PackedRow, TextArguments
from transfuse.layers.ragged_mask import ragged_mask
from transfuse.trace.recorder import Recorder

# Unlike any size of a model, so that no dimension of the row is taken for one of the model's.
NUM_TOKENS = 7
_NAME = "transfuse_recorded"


def run_ragged(twin: Any, recorder: Recorder, probe: LayerProbe) -> None:
    """A forward as the engine serves it, over the paged cache.

    Args:
        twin: a model on `meta`.
        recorder: records it.
        probe: takes the place of its cache.
    """
    arguments = ForwardArguments.of(type(twin))
    with (
        torch.device("meta"),
        _attention_of(twin, recorder, paged_attention_forward, ragged_mask),
        fused_experts_of(twin),
    ):
        input_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        more = {"logits_to_keep": torch.arange(NUM_TOKENS)} if arguments.takes_logit_rows else {}
        if arguments.takes_mask:
            more["attention_mask"] = torch.ones_like(input_ids)
        if arguments.takes_positions:
            more["position_ids"] = torch.arange(NUM_TOKENS).unsqueeze(0)
        with attending_to(probe), _one_node(recorder, probe):
            twin(
                input_ids=input_ids,
                use_cache=True,
                **{arguments.cache: probe, **more},
            )


def run_packed(twin: Any, recorder: Recorder) -> None:
    """A forward as texts are embedded: packed, without a cache.

    Args:
        twin: a model on `meta`.
        recorder: records it.
    """
    with (
        torch.device("meta"),
        _attention_of(twin, recorder, packed_attention_forward, packed_mask),
        fused_experts_of(twin),
    ):
        row = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        borders = torch.zeros(2, dtype=torch.int32)
        TextArguments.of(type(twin)).call(twin, PackedRow(row, torch.arange(NUM_TOKENS), row, borders))


def run_alone(twin: Any, recorder: Recorder, *, makes_own_cache: bool = False) -> None:
    """A forward as Transformers runs it, with its own masks and cache: for models that the engine does not serve so.

    Args:
        twin: a model on `meta`.
        recorder: records it.
        makes_own_cache: whether it is left to the model to make a cache.
    """
    names = set(inspect.signature(twin.forward).parameters)
    with torch.device("meta"), _attention_of(twin, recorder, _attention, eager_mask), fused_experts_of(twin):
        given: dict[str, Any] = {"input_ids": torch.zeros(1, NUM_TOKENS, dtype=torch.int64)}
        if "position_ids" in names:
            given["position_ids"] = torch.arange(NUM_TOKENS).unsqueeze(0)
        cache = DynamicCache(config=twin.config.get_text_config(decoder=True))
        name = next((name for name in ("cache", "past_key_values") if name in names), None)
        if name is not None:
            given |= {"use_cache": True} if makes_own_cache else {name: cache, "use_cache": True}
        with _one_node(recorder, cache):
            twin(**given)


@contextmanager
def _attention_of(
    twin: nn.Module, recorder: Recorder, attention: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Within it, the attention layers of `twin` call `attention`, recorded as one node."""
    attention.is_attention = True  # type: ignore[attr-defined]
    AttentionInterface.register(_NAME, recorder.opaque(attention))
    AttentionMaskInterface.register(_NAME, mask)
    with implementation_of(twin, "_attn_implementation", _NAME):
        yield


@contextmanager
def _one_node(recorder: Recorder, cache: Any) -> Iterator[None]:
    """Within it, updates of a cache are recorded as one node each."""
    cache.update = recorder.opaque(cache.update)
    try:
        yield
    finally:
        del cache.update


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Something in the shape of attention."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
