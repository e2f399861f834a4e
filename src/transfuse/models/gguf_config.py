"""Turns a GGUF file's metadata into a Transformers config."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from transfuse.errors import UnsupportedModelError, WeightsError
from transfuse.models.gguf import ROPE_FACTORS, LazyTensor, map_bytes
from transfuse.models.gguf_reader import GgufFile, end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# General names of the files' families and Transformers' names for them.
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The Transformers config that the file's metadata describes.

    Raises:
        UnsupportedModelError: a family, or a setting within a family, that is not known here.
        WeightsError: a key that the family needs is missing or has the wrong type.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    family = file.architecture
    if family not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of the GGUF family {family!r}; supported are {', '.join(_MODEL_TYPES)}. "
            "Use the original safetensors folder of this model instead."
        )
    settings = _common_settings(file)
    if family == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if family == "gemma3":
        settings |= _gemma3_settings(file, settings)
    try:
        return AutoConfig.for_model(_MODEL_TYPES[family], **settings)
    except (TypeError, ValueError, ZeroDivisionError, StrictDataclassError) as error:
        raise WeightsError(f"{file.path} describes a model that cannot be: {error}.") from error


def _common_settings(file: GgufFile) -> dict[str, Any]:
    num_heads = _integer(file, "attention.head_count")
    hidden_size = _integer(file, "embedding_length")
    num_layers = _integer(file, "block_count")
    num_kv_heads = _integer(file, "attention.head_count_kv", num_heads)
    heads_fit = 1 <= num_kv_heads <= num_heads <= hidden_size and num_heads % num_kv_heads == 0
    if not heads_fit or not 1 <= num_layers <= len(file.tensors):
        raise WeightsError(
            f"{file.path} claims {num_heads} query and {num_kv_heads} key/value heads at width {hidden_size}, and "
            f"{num_layers} layers in {len(file.tensors)} tensors, which cannot be."
        )
    head_dim = _integer(file, "attention.key_length", hidden_size // num_heads)
    _refuse_unless_equal(file, "attention.value_length", head_dim)
    _refuse_unless_equal(file, "rope.dimension_count", head_dim)
    _refuse_unless_equal(file, "expert_count", 0)
    ends = end_token_ids(file)
    return {
        "architectures": [_CLASSES[file.architecture]],
        "max_position_embeddings": _integer(file, "context_length"),
        "hidden_size": hidden_size,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _float(file, "attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(file),
        # llama.cpp writes the output projection only where it differs from the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _gemma3_settings(file: GgufFile, common: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = common["num_hidden_layers"], common["head_dim"]
    # The 27B model alone scales by its width per head, and the file does not say so (llama.cpp: 62 layers).
    scale = common["hidden_size"] // common["num_attention_heads"] if num_layers == 62 else head_dim
    settings = {
        "query_pre_attn_scalar": scale,
        "sliding_window": _integer(file, "attention.sliding_window"),
        "final_logit_softcapping": file.metadata.get("gemma3.final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": common["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _float(file, "rope.freq_base_swa", 10_000.0),
            },
        },
    }
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    else:
        settings["sliding_window_pattern"] = pattern
    return settings


def _rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = _float(file, "rope.freq_base", 10_000.0)
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _float(file, "rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = _integer(file, "rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UnsupportedModelError(
        f"{file.path} scales its rotary embedding by {kind!r}; supported are none, linear, yarn and Llama 3's factors. "
        "Use the original safetensors folder of this model instead."
    )


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds Llama 3's parameters again, of which the file keeps only the resulting factors."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = LazyTensor(map_bytes(file), file.tensors[ROPE_FACTORS], torch.float32, None)[...]
    refusal = UnsupportedModelError(
        f"{file.path} holds rotary frequency factors ({ROPE_FACTORS}) that are not Llama 3's. Use the original "
        "safetensors folder of this model instead."
    )
    if stored.shape != (head_dim // 2,):
        raise refusal
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters=dict(parameters),
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if not torch.allclose(plain / stored, frequencies, rtol=1e-3):
        raise refusal
    return parameters


def _vocab_size(file: GgufFile) -> int:
    # The embedding says how many rows the model has; the token list may be shorter than a padded vocabulary.
    if embedding := file.tensors.get("token_embd.weight"):
        return embedding.shape[0]
    raise WeightsError(f"{file.path} has no tensor token_embd.weight.", missing=("token_embd.weight",))


def _refuse_unless_equal(file: GgufFile, key: str, expected: int) -> None:
    value = _integer(file, key, expected)
    if value != expected:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.{key} is {value}, and only {expected} is supported for this family. Use "
            "the original safetensors folder of this model instead."
        )


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(f"{file.architecture}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise WeightsError(
            f"{file.path}: the metadata key {file.architecture}.{key} is {value!r}; expected an integer below 2^31."
        )
    return value


def _float(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(f"{file.architecture}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise WeightsError(
            f"{file.path}: the metadata key {file.architecture}.{key} is {value!r}; expected a number above 0."
        )
    return float(value)
