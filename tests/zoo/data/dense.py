"""Types with ordinary layers only, and old encoders that are run as decoders."""

from __future__ import annotations

from tests.zoo.data.sizes import FULL, GRANITE, ROPE, SLIDING, Overrides

LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16, partial_rotary_factor=1.0
)

OVERRIDES: dict[str, Overrides] = {
    "big_bird": dict(attention_type="original_full"),
    "cohere": dict(logit_scale=0.75, use_qk_norm=True),
    "cohere2": dict(logit_scale=0.75, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL]),
    "cohere_compass_text": dict(
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        logit_scale=0.5,
        rope_parameters={SLIDING: {**ROPE}, FULL: None},
    ),
    "cpmant": dict(position_bias_num_buckets=32, position_bias_max_distance=64, prompt_length=4),
    "cwm": dict(layer_types=[SLIDING, FULL]),
    "doge": dict(keep_window_size=12),
    "dory": dict(
        num_hidden_layers=4,
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "exaone4": dict(num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL]),
    "gpt_bigcode": dict(num_key_value_heads=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granite": GRANITE,
    "granite_swa": GRANITE | dict(layer_types=[SLIDING, FULL], layer_rope_theta=[10000.0, 500000.0]),
    "helium": dict(head_dim=16),
    "hrm_text": dict(H_cycles=2, L_cycles=2, num_hidden_layers=1, prefix_lm=False, embedding_scale=2.0),
    "hyperclovax": GRANITE,
    "modernbert-decoder": dict(layer_types=[SLIDING, FULL], local_attention=16),
    "olmo": dict(clip_qkv=2.0),
    "olmo3": dict(layer_types=[SLIDING, FULL]),
    "opt": dict(word_embed_proj_dim=64),
    "qwen2": dict(layer_types=[FULL, SLIDING], use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": dict(layer_types=[FULL, SLIDING], use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "reformer": dict(
        attn_layers=["local", "lsh", "local", "lsh"],
        num_hidden_layers=4,
        axial_pos_shape=(16, 32),
        axial_pos_embds_dim=(16, 48),
        local_attn_chunk_length=8,
        lsh_attn_chunk_length=8,
        num_buckets=4,
        hash_seed=0,
    ),
    "rembert": dict(input_embedding_size=32, output_embedding_size=64),
    "roc_bert": dict(pronunciation_embed_dim=16, pronunciation_vocab_size=64, shape_embed_dim=16, shape_vocab_size=64),
    "smollm3": dict(
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        use_sliding_window=True,
        sliding_window=8,
    ),
    "stablelm": dict(use_qkv_bias=True, qk_layernorm=True),
    "xlm": dict(causal=True, mask_token_id=5, pad_index=0, bos_index=1, eos_index=2),
    "xmod": dict(default_language="en_XX"),
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "doge": {"moe": dict(is_moe=True, num_experts=16, num_experts_per_tok=4)},
    "dory": {"last_loop": dict(recurrent_kv_cache_mode="last_loop")},
    "falcon": {
        "new_decoder": dict(new_decoder_architecture=True, num_kv_heads=2),
        "alibi": dict(alibi=True, multi_query=False, num_kv_heads=4, parallel_attn=False, bias=True),
    },
    "gpt2": {"scaled": dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)},
    "gpt_bigcode": {"mha": dict(multi_query=False, num_key_value_heads=4)},
    "gpt_neox": {"sequential": dict(use_parallel_residual=False)},
    "hrm_text": {"prefix_lm": dict(prefix_lm=True)},
    "llama": {
        "mha": dict(num_key_value_heads=4),
        "biased": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "llama3": dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
        "yarn": dict(
            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
        ),
        "linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
        "dynamic": dict(
            max_position_embeddings=24, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
        ),
    },
    "mistral": {"full": dict(sliding_window=None)},
    "mpt": {"learned": dict(attn_config=dict(alibi=False))},
    "opt": {"350m": dict(do_layer_norm_before=False, word_embed_proj_dim=32)},
    "phi": {"qk_layernorm": dict(qk_layernorm=True)},
    "phi3": {
        "sliding": dict(sliding_window=8),
        "longrope": dict(
            original_max_position_embeddings=16,
            rope_parameters=dict(
                LONGROPE, short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)]
            ),
        ),
    },
    "qwen2": {"full": dict(use_sliding_window=False, layer_types=[FULL, FULL], sliding_window=None)},
    "qwen3": {"full": dict(use_sliding_window=False, layer_types=[FULL, FULL], sliding_window=None)},
    "roformer": {"rotary_value": dict(rotary_value=True)},
    "stablelm": {"parallel": dict(use_parallel_residual=True, qk_layernorm=False, use_qkv_bias=False)},
}
