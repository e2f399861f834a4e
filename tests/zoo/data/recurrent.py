"""Types with recurrent or convolution state: hybrids and pure state-space models."""

from __future__ import annotations

from tests.zoo.data.sizes import (
    DENSE,
    FULL,
    GRANITE,
    HYBRID,
    HYBRID_SLIDING,
    LINEAR,
    MLA,
    ROPE,
    SLIDING,
    SPARSE,
    Overrides,
)

MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2)
GATED_DELTA_NET = dict(num_hidden_layers=4, layer_types=[LINEAR, FULL, LINEAR, FULL])
QWEN3_5_TEXT = GATED_DELTA_NET | dict(
    rope_parameters={**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
)
INKLING = dict(
    num_hidden_layers=4,
    layer_types=[HYBRID_SLIDING, HYBRID, HYBRID_SLIDING, HYBRID],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=1,
    swa_head_dim=16,
    d_rel=8,
    rel_extent=8,
    log_scaling_n_floor=8,
    unpadded_vocab_size=500,
)

OVERRIDES: dict[str, Overrides] = {
    "bailing_hybrid": MLA
    | dict(
        num_hidden_layers=4, layer_types=[LINEAR, LINEAR, FULL, FULL], mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE]
    ),
    "bamba": MAMBA2 | dict(num_hidden_layers=3, attn_layer_indices=[1]),
    "falcon_h1": MAMBA2
    | dict(
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        attention_in_multiplier=0.8,
        attention_out_multiplier=0.9,
        embedding_multiplier=1.5,
        key_multiplier=0.7,
        lm_head_multiplier=0.6,
        mlp_multipliers=[0.8, 0.9],
        ssm_in_multiplier=1.2,
        ssm_multipliers=[0.8, 0.9, 1.1, 1.2, 0.7],
        ssm_out_multiplier=0.9,
    ),
    "falcon_mamba": dict(intermediate_size=128),
    "granitemoehybrid": GRANITE
    | MAMBA2
    | dict(num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], position_embedding_type="rope"),
    "inkling2_loop_text": INKLING
    | dict(
        num_hidden_layers=6,
        layer_types=[HYBRID_SLIDING, HYBRID, HYBRID_SLIDING, HYBRID, HYBRID_SLIDING, HYBRID],
        n_layers_per_attn_res_block=2,
        loop_layer_index_start=2,
        loop_layer_index_end=4,
        loop_num_passes=2,
        loop_gate_rank=8,
    ),
    "inkling2_text": INKLING | dict(n_layers_per_attn_res_block=2),
    "inkling_text": INKLING | dict(mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE], logits_mup_width_multiplier=2.0),
    "jamba": dict(
        num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=3, expert_layer_offset=1
    ),
    "kimi_linear": MLA
    | dict(
        num_hidden_layers=4, layer_types=[LINEAR, FULL, LINEAR, FULL], mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE]
    ),
    "lara_mini": dict(num_hidden_layers=4, layer_types=[LINEAR, SLIDING, FULL, LINEAR]),
    "lfm2": dict(num_hidden_layers=4, layer_types=["conv", FULL, "conv", FULL], block_multiple_of=32),
    "lfm2_moe": dict(num_hidden_layers=4, layer_types=["conv", FULL, "conv", FULL], num_dense_layers=1),
    "lfm3": dict(num_hidden_layers=4, layer_types=["conv", SLIDING, "conv", FULL]),
    "mamba": dict(intermediate_size=128),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2),
    "minimax": dict(num_hidden_layers=4, layer_types=[LINEAR, FULL, LINEAR, FULL], block_size=8),
    "nemotron_h": dict(
        layers_block_type=[LINEAR, "moe", FULL, "mlp", LINEAR, FULL],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=32,
        num_hidden_layers=6,
        time_step_min=1e-06,
    ),
    "olmo_hybrid": dict(
        num_hidden_layers=4, layer_types=[LINEAR, FULL, LINEAR, FULL], linear_value_head_dim=32, linear_num_key_heads=4
    ),
    "qwen3_5": dict(text_config=QWEN3_5_TEXT),
    "qwen3_5_moe": dict(text_config=QWEN3_5_TEXT),
    "qwen3_5_moe_text": QWEN3_5_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_next": GATED_DELTA_NET | dict(mlp_only_layers=[0]),
    "recurrent_gemma": dict(num_hidden_layers=3, lru_width=64, num_key_value_heads=1, head_dim=16),
    "rwkv": dict(attention_hidden_size=64),
    "xlstm": dict(chunk_size=8, hidden_size=128, embedding_dim=128),
    "zamba": dict(
        num_hidden_layers=5,
        layers_block_type=[LINEAR, LINEAR, HYBRID, LINEAR, HYBRID],
        num_key_value_heads=4,
        attention_hidden_size=128,
        attention_head_dim=32,
    ),
    "zamba2": dict(
        num_hidden_layers=5,
        layers_block_type=[LINEAR, HYBRID, LINEAR, HYBRID, HYBRID],
        hybrid_layer_ids=[1, 3, 4],
        num_key_value_heads=4,
        attention_hidden_size=128,
        attention_head_dim=32,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=2,
        num_mem_blocks=2,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        time_step_min=1e-06,
    ),
    "zaya": dict(
        num_hidden_layers=4,
        layer_types=[HYBRID, HYBRID_SLIDING, HYBRID, HYBRID_SLIDING],
        sliding_window=8,
        router_hidden_size=16,
        num_experts_per_tok=1,
    ),
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "granitemoehybrid": {"nope": dict(position_embedding_type="nope"), "dense": dict(num_local_experts=0)},
    "jamba": {"dense": dict(num_experts=1)},
    "nemotron_h": {"no_latent": dict(moe_latent_size=None)},
    "zamba2": {"plain": dict(use_shared_attention_adapter=False, use_mem_rope=False, num_mem_blocks=1)},
}
