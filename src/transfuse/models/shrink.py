"""Makes a config small enough to check in a moment, with every kind of layer still in it."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from transfuse.models.lengths import longest_text

log = logging.getLogger(__name__)

_MAX_LAYERS = 12
_DEFAULT_LAYERS = 4
_MAX_VOCAB = 512
_MAX_WINDOW = 8
_MAX_FEED_FORWARD = 96
_MAX_RANK = 64
_MAX_EXPERTS = 8
# What a config calls by names of its own stays large; a gigabyte is too much for a check.
_MAX_PARAMETERS = 2**28

# What Transformers' configs call these; a name that a config lacks is left alone.
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_FEED_FORWARD = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "dff",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
)
_RANKS = ("q_lora_rank", "kv_lora_rank")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Groups of experts, groups that a token may use, and experts of a token: few enough for `_MAX_EXPERTS` experts.
_EXPERT_CHOICE = {
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
}
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size", "keep_window_size")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
# Dense layers in front of sparse ones.
_LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# What modules call the number that keeps them from dividing by zero.
_EPS = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
# Every so many layers one is of another kind, where no list says which.
_PERIOD = re.compile(r"period|interval|_step$|_freq$|every|pattern")


def shrink_config(config: PreTrainedConfig, *, keeps_depth: bool = False) -> PreTrainedConfig:
    """A copy of `config` with few layers, heads, experts and tokens, and short windows.

    Head sizes stay, since position embeddings depend on them. Of the layers a prefix stays in which every kind (every
    combination of per-layer settings) occurs, or one of each kind where that prefix is long; of layers at the end that
    reuse the keys of earlier ones likewise. Encoders of images and sound keep one layer.

    A config may tie its number of layers to other settings: where its own rules say so, all layers stay. The result
    need not be consistent in other ways. Building and running the model shows it.

    Args:
        config: it stays as it is.
        keeps_depth: whether all layers stay.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    overrides = _take_overrides(text)
    kept = list(range(max(overrides, default=-1) + 1)) if keeps_depth else _shrink_depth(text, overrides)
    if not keeps_depth and not _is_valid(text):
        return shrink_config(config, keeps_depth=True)
    heads = _shrink_width(text)
    _shrink_sizes(text)
    _shrink_vocabulary(text)
    if overrides:
        text.per_layer_config = {
            index: _shrunk_override(overrides[layer], *heads) for index, layer in enumerate(kept) if layer in overrides
        }
    for other in vars(small).values():
        if isinstance(other, PreTrainedConfig) and other is not text:
            _shrink_encoder(other)
    return small


def _take_overrides(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Settings of single layers that differ from the rest, by layer; while they are taken off, all can be read."""
    if not config.is_heterogeneous:
        return {}
    overrides = {int(layer): values for layer, values in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return overrides


def _is_valid(config: PreTrainedConfig) -> bool:
    try:
        config.validate()
    except Exception as error:
        log.debug("a config of fewer layers is refused: %s", error)
        return False
    return True


def _first(config: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)


def _cap(config: Any, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)
    elif isinstance(value, list) and all(isinstance(v, int) for v in value):
        setattr(config, name, [min(v, most) for v in value])


def _shrink_depth(config: PreTrainedConfig, overrides: Mapping[int, object]) -> list[int]:
    """Drop layers; returns the indices of those that stay."""
    name = _first(config, _DEPTH)
    if name is None:
        return []
    depth = getattr(config, name)
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == depth and depth > 1}
    kinds = [repr([*(values[layer] for values in lists.values()), overrides.get(layer)]) for layer in range(depth)]
    least = max(2 if lists or overrides else _DEFAULT_LAYERS, *_periods(config))
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    own, shared = list(range(depth - num_shared)), list(range(depth - num_shared, depth))
    kept_shared = _kept(shared, kinds, 0)
    kept = _kept(own, kinds, least) + kept_shared
    for key, values in lists.items():
        setattr(config, key, [values[layer] for layer in kept])
    setattr(config, name, len(kept))
    if num_shared:
        config.num_kv_shared_layers = len(kept_shared)
    # They must leave room for a sparse one.
    for key in _LEADING:
        _cap(config, key, 1)
    return kept


def _periods(config: PreTrainedConfig) -> list[int]:
    values = [v for k, v in vars(config).items() if isinstance(v, int) and _PERIOD.search(k)]
    return [v for v in values if v <= _MAX_LAYERS] or [0]


def _kept(layers: list[int], kinds: list[str], least: int) -> list[int]:
    """The shortest prefix in which every kind that occurs in `layers` does, or, where that is long, one of each."""
    of_layers = [kinds[layer] for layer in layers]
    firsts = [of_layers.index(kind) for kind in dict.fromkeys(of_layers)]
    needed = max(least, *(first + 1 for first in firsts), 0)
    if needed <= _MAX_LAYERS:
        return layers[:needed]
    return [layers[first] for first in firsts[:_MAX_LAYERS]]


def _shrink_width(config: PreTrainedConfig) -> tuple[int, int]:
    """Drop heads and narrow the model to match; returns the number of heads before and after."""
    heads_name, hidden_name = _first(config, _HEADS), _first(config, _HIDDEN)
    if heads_name is None or hidden_name is None:
        return 0, 0
    before, hidden = getattr(config, heads_name), getattr(config, hidden_name)
    head_dim = getattr(config, "head_dim", None) or hidden // before
    after = min(before, 4 if head_dim <= 128 else 2)
    _shrink_heads(config, before, after)
    # Heads may lie in a widened stream.
    expand = getattr(config, "expand", 1)
    width = after * head_dim // (expand if before * head_dim == hidden * expand else 1)
    setattr(config, hidden_name, min(hidden, width))
    return before, after


def _shrink_heads(config: Any, before: int, after: int) -> None:
    """Keep the two kinds of key heads apart: one for each query head, or one for several."""
    if before <= after:
        return
    kv_name, heads_name = _first(config, _KV_HEADS), _first(config, _HEADS)
    if kv_name is not None:
        kv_heads = getattr(config, kv_name)
        setattr(config, kv_name, after if kv_heads == before else min(kv_heads, after // 2))
    if heads_name is not None:
        setattr(config, heads_name, after)


def _shrink_sizes(config: Any) -> None:
    for names, most in (
        (_FEED_FORWARD, _MAX_FEED_FORWARD),
        (_RANKS, _MAX_RANK),
        (_EXPERTS, _MAX_EXPERTS),
    ):
        for name in names:
            _cap(config, name, most)
    _shrink_windows(config)
    for name, most in _EXPERT_CHOICE.items():
        _cap(config, name, most)


def _shrink_windows(config: Any) -> None:
    """Windows get shorter than the texts of a check, unless they are as long as any text: then they never act."""
    longest = longest_text(config) if isinstance(config, PreTrainedConfig) else None
    for name in _WINDOWS:
        window = getattr(config, name, None)
        if longest is None or not isinstance(window, int) or window < longest:
            _cap(config, name, _MAX_WINDOW)


def _shrunk_override(values: dict[str, Any], heads_before: int, heads_after: int) -> dict[str, Any]:
    settings = SimpleNamespace(**values)
    own_heads = _first(settings, _HEADS)
    _shrink_heads(settings, heads_before if own_heads is None else getattr(settings, own_heads), heads_after)
    _shrink_sizes(settings)
    return vars(settings)


def _shrink_encoder(config: PreTrainedConfig) -> None:
    if (name := _first(config, _DEPTH)) is not None:
        _cap(config, name, 1)
    for name in _FEED_FORWARD:
        _cap(config, name, _MAX_FEED_FORWARD)


def _shrink_vocabulary(config: PreTrainedConfig) -> None:
    for name in _VOCABULARIES:
        _cap(config, name, _MAX_VOCAB)
    vocab_size = getattr(config, "vocab_size", _MAX_VOCAB)
    for name, value in list(vars(config).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= vocab_size:
            setattr(config, name, vocab_size - 1 if name != "pad_token_id" else 0)
        elif name.endswith("token_id") and isinstance(value, list):
            setattr(config, name, [min(v, vocab_size - 1) for v in value])


def enlarge_eps(model: PreTrainedModel) -> None:
    """Make what norms add before they divide so large that the logits show it, and keep different ones apart."""
    for module in model.modules():
        for name in _EPS:
            value = getattr(module, name, None)
            if isinstance(value, float) and 0.0 < value < 1e-2:
                # 0.05 for 1e-5, 0.06 for 1e-6.
                setattr(module, name, -math.log10(value) / 100)


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


def build_shrunk(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0, *, keeps_depth: bool = False
) -> PreTrainedModel:
    """A small random float32 instance of `model_class`, in eval mode; see `shrink_config`.

    Raises:
        ValueError: the instance would still be large.
        Exception: whatever the model's own code raises for a config that does not fit together.
    """
    small: Any = shrink_config(config, keeps_depth=keeps_depth)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class._from_config(small).parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(f"the shrunk config still has {num_parameters} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(small, dtype=torch.float32)
    model.eval()
    enlarge_eps(model)
    randomise(model, seed)
    return model
