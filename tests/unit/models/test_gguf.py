from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.unit.models.gguf_files import F32, Q4_1, Q5_0, Q8_0, tiny_model, write_gguf
from transfuse.errors import UnsupportedModelError, WeightsError
from transfuse.models.loader import LoadedModel, load_config, load_model
from transfuse.models.resolve import ModelSource


def source(path: Path) -> ModelSource:
    return ModelSource("gguf", path, path.stem)


def load(path: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(source(path), dtype=dtype, show_progress=False)


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", F32),
        ("llama", Q8_0),
        ("llama", Q5_0),
        ("llama", Q4_1),
        ("qwen2", Q8_0),
        ("qwen3", Q8_0),
        ("gemma3", F32),
        ("gemma3", Q4_1),
    ],
)
def test_logits_equal_those_of_the_model_it_was_written_from(family: str, kind: Any, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load(write_gguf(tmp_path / "m.gguf", family, model, kind), dtype="float32")

    # Norms of Gemma lose their last bits in the file, which stores 1 + w.
    tolerance = 1e-5 if family == "gemma3" else 0.0
    torch.testing.assert_close(logits(loaded.module), logits(model), rtol=tolerance, atol=tolerance)


def test_loaded_module_is_frozen_in_eval_mode_and_counts_tied_weights_once(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    loaded = load(write_gguf(tmp_path / "m.gguf", "qwen2", model))

    module = loaded.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    assert loaded.num_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [(F32, "auto", torch.float32), (Q8_0, "auto", torch.bfloat16), (Q8_0, "float16", torch.float16)],
)
def test_dtype(kind: Any, dtype: str, expected: Any, tmp_path: Path) -> None:
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), kind), dtype)

    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}
    assert loaded.config.dtype == expected


def test_generation_config_ends_at_the_files_tokens_and_at_end_of_turn(tmp_path: Path) -> None:
    tokens = ["<pad>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        # The last one is spelled like an end of turn and is an ordinary token.
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1],
    }
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=metadata))

    assert loaded.generation_config.eos_token_id == [2, 3]
    assert loaded.config.eos_token_id == [2, 3]


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny_model("llama"),
        skip=("blk.1.ffn_up.weight",),
        tensors={
            "blk.0.attn_norm.weight": np.ones(32, np.float32),
            "blk.0.strange.weight": np.ones(32, np.float32),
        },
    )
    with pytest.raises(WeightsError, match=r"1 missing .*1 unexpected .*1 misshapen") as caught:
        load(path)

    assert caught.value.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert caught.value.unexpected == ("blk.0.strange.weight",)
    assert caught.value.misshapen == ("model.layers.0.input_layernorm.weight: checkpoint (32,) -> model (64,)",)


def test_llama3_rope_factors_become_the_config_again(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {**tiny_model("llama").config.to_dict(), "hidden_size": 256, "head_dim": 64, "rope_parameters": rope}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model, tensors={"rope_freqs.weight": (plain / scaled).float().numpy()}
    )
    loaded = load(path)

    assert loaded.config.rope_parameters == rope
    torch.testing.assert_close(logits(loaded.module), logits(model), rtol=0, atol=0)


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="not Llama 3's"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=metadata)

    assert load_config(source(path), trust_remote_code=False).rope_parameters == {"rope_theta": 5000.0, **expected}


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, and only 16"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
    ],
)
def test_settings_that_would_change_the_numbers_are_refused(
    metadata: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=match):
        load(path)


def test_unknown_family_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    path.write_bytes(path.read_bytes().replace(b"llama", b"zzama"))
    with pytest.raises(UnsupportedModelError, match=r"'zzama'; supported are llama, qwen2, qwen3, gemma3"):
        load(path)


def test_gemma3_27b_scales_by_width_per_head(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3", tiny_model("gemma3"), metadata={"gemma3.block_count": 62})
    config = load_config(source(path), trust_remote_code=False)

    assert config.query_pre_attn_scalar == 64 // 4
    assert config.layer_types[:6] == ["sliding_attention"] * 5 + ["full_attention"]


def test_biases_of_the_llama_family_are_reordered_too(tmp_path: Path) -> None:
    config = LlamaConfig(**{**tiny_model("llama").config.to_dict(), "attention_bias": True, "mlp_bias": True})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", model))

    torch.testing.assert_close(logits(loaded.module), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": 2**30},
        {"llama.embedding_length": 2**31 - 1},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": 2**31},
        {"llama.attention.head_count_kv": 2**30},
        {"llama.attention.head_count_kv": 0},
        {"llama.feed_forward_length": 2**31 - 1},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.context_length": "many"},
        {"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30},
    ],
    ids=str,
)
def test_absurd_sizes_are_refused_before_memory_is_taken(metadata: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), metadata=metadata)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError):
        load(path)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
