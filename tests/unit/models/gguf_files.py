"""Writes tiny Transformers models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

F32, Q8_0, Q5_0, Q4_1 = (GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q5_0", "Q4_1"))

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_model(family: str) -> PreTrainedModel:
    """A random float32 model whose norms and biases are random as well, so that no mapping error hides."""
    torch.manual_seed(7)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32))
    else:
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_SIZES | {"num_hidden_layers": 7}, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
            )
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.3 if "norm" in name and family != "gemma3" else 0.0, 0.2)
    return model.eval()


def write_gguf(path: Path, family: str, model: PreTrainedModel, kind: GGMLQuantizationType = F32, **extra: Any) -> Path:
    """Writes `model` and puts the dequantised weights back into it, so that both hold the same numbers.

    Args:
        extra: `tensors`, `metadata` (full keys) and `skip` (GGUF names) change what is written.
    """
    writer = GGUFWriter(path, family)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    add_metadata(
        writer, {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2} | extra.get("metadata", {})
    )
    for name, array in (gguf_tensors(family, model, kind) | extra.get("tensors", {})).items():
        if name not in extra.get("skip", ()):
            quantised = array.dtype == np.uint8
            writer.add_tensor(name, array, raw_dtype=kind if quantised else None)
    return finish(writer)


def gguf_tensors(family: str, model: PreTrainedModel, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family), model.config.num_hidden_layers
    )
    tensors: dict[str, np.ndarray] = {}
    for hf_name, parameter in model.named_parameters():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        array = _to_llama_cpp(family, name, parameter.detach().numpy(), model.config)
        if array.ndim == 2 and kind != F32:
            tensors[name] = quants.quantize(array, kind)
            array = quants.dequantize(tensors[name], kind)
            parameter.data.copy_(torch.from_numpy(_from_llama_cpp(family, name, array, model.config)))
        else:
            tensors[name] = array.copy()
    return tensors


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def finish(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def _heads(name: str, config: Any) -> int | None:
    if ".attn_q." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".attn_k." in name else None


def _to_llama_cpp(family: str, name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if family == "gemma3" and name.endswith("norm.weight"):
        return array + 1
    if family == "llama" and (heads := _heads(name, config)):
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return array


def _from_llama_cpp(family: str, name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if family == "llama" and (heads := _heads(name, config)):
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
    return array
