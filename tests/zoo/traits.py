"""Reads off a model's config and modules what its architecture has."""

from __future__ import annotations

import inspect
import re
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

_FORWARD_ARGS = {
    "position_ids",
    "attention_mask",
    "cache",
    "cache_params",
    "state",
    "mems",
    "logits_to_keep",
    "use_cache",
}
_STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """Kind of each cache layer, from the config; empty where the config describes none."""
    return list(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])


def traits(model: PreTrainedModel) -> dict[str, Any]:
    """Facts by name; those that are true or false are what `facts.TRAITS` lists."""
    whole = model.config.to_dict()
    config = model.config.get_text_config(decoder=True)
    classes = " ".join({type(m).__name__ for m in model.modules()})
    params = " ".join(name for name, _ in model.named_parameters())
    kinds = layer_kinds(model)

    def has(pattern: str, text: str) -> bool:
        return bool(re.search(pattern, text))

    return dict(
        kinds=kinds,
        moe=has(r"Moe|MoE|Expert", classes),
        mla="kv_lora_rank" in vars(config) or "kv_a_proj" in params,
        q_lora=bool(vars(config).get("q_lora_rank")),
        recurrent=bool(_STATE_KINDS & set(kinds)) or has(r"Rwkv|xLSTM", classes),
        indexed=has(r"Indexer|Compressor", classes),
        kv_sharing="dummy" in kinds and bool(getattr(config, "num_kv_shared_layers", 0)),
        cross_attention=has(r"crossattention|cross_attn|encoder_attn", params),
        encoder_decoder_config=bool(whole.get("encoder_layers") or whole.get("num_encoder_layers")),
        sinks=has(r"sink", params),
        rope="Rotary" in classes or hasattr(model.config, "rotary_dim"),
        learned_positions=has(r"wpe|position_embedding|embed_positions|positions_embed|pos_emb", params),
        forward_args=sorted(set(inspect.signature(model.forward).parameters) & _FORWARD_ARGS),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
