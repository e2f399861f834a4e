"""Makes a config small enough to check in a moment, with every kind of layer still in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

_MAX_HEADS = 4
_MAX_LAYERS = 8
_DEFAULT_LAYERS = 4
_MAX_VOCAB = 512
_MAX_WINDOW = 8

# What Transformers' configs call these; a name that a config lacks is left alone.
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_FEED_FORWARD = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size")


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` with few layers, heads, experts and tokens, and short windows.

    Head sizes stay, since position embeddings depend on them. The depth is the shortest prefix of the layers in which
    every kind (every combination of per-layer settings) occurs.

    The result need not be consistent: a config may tie sizes together by rules of its own. Building and running the
    model shows it.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    _shrink_depth(text)
    _shrink_width(text)
    for name in _FEED_FORWARD:
        _cap(text, name, 96)
    for name in _EXPERTS:
        _cap(text, name, 8)
    for name in _WINDOWS:
        _cap(text, name, _MAX_WINDOW)
    _shrink_vocabulary(text)
    return small


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)


def _cap(config: PreTrainedConfig, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)


def _shrink_depth(config: PreTrainedConfig) -> None:
    name = _first(config, _DEPTH)
    if name is None:
        return
    depth = getattr(config, name)
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == depth and depth > 1}
    kinds = [repr([values[layer] for values in lists.values()]) for layer in range(depth)]
    last_new = max(kinds.index(kind) for kind in kinds)
    keep = min(depth, _MAX_LAYERS, max(last_new + 1, 2 if lists else _DEFAULT_LAYERS))
    for key, values in lists.items():
        setattr(config, key, values[:keep])
    setattr(config, name, keep)
    # Dense layers in front of sparse ones must leave room for a sparse one.
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        _cap(config, key, 1)


def _shrink_width(config: PreTrainedConfig) -> None:
    heads_name, hidden_name = _first(config, _HEADS), _first(config, _HIDDEN)
    if heads_name is None or hidden_name is None:
        return
    heads, hidden = getattr(config, heads_name), getattr(config, hidden_name)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_name = _first(config, _KV_HEADS)
    if heads > _MAX_HEADS:
        if kv_name is not None:
            kv_heads = getattr(config, kv_name)
            setattr(config, kv_name, _MAX_HEADS if kv_heads == heads else min(kv_heads, _MAX_HEADS // 2))
        setattr(config, heads_name, _MAX_HEADS)
    setattr(config, hidden_name, min(hidden, getattr(config, heads_name) * head_dim))


def _shrink_vocabulary(config: PreTrainedConfig) -> None:
    _cap(config, "vocab_size", _MAX_VOCAB)
    vocab_size = getattr(config, "vocab_size", _MAX_VOCAB)
    for name, value in list(vars(config).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= vocab_size:
            setattr(config, name, vocab_size - 1 if name != "pad_token_id" else 0)
        elif name.endswith("token_id") and isinstance(value, list):
            setattr(config, name, [min(v, vocab_size - 1) for v in value])


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw weights under which a fault anywhere moves the logits.

    A fresh model has zero biases, unit norms and logits near zero, which would hide most faults. Matrices become
    normal with deviation 1 / sqrt(fan in); vectors (norms, biases, sinks, scales) keep their value plus noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, torch.nn.Embedding):
                parameter.copy_(noise(parameter))
            elif parameter.dim() >= 2:
                parameter.copy_(noise(parameter) * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise(parameter), alpha=0.1)


def build_shrunk(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A small random float32 instance of `model_class`, in eval mode.

    Raises:
        Exception: whatever the model's own code raises for a config that does not fit together.
    """
    small: Any = shrink_config(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class._from_config(small, dtype=torch.float32)
    model.eval()
    randomise(model, seed)
    return model
