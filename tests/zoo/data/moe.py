"""Types with sparse experts on ordinary attention."""

from __future__ import annotations

from tests.zoo.data.sizes import CHUNKED, DENSE, FULL, GRANITE, SLIDING, SPARSE, Overrides

LLAMA4_TEXT = dict(
    num_hidden_layers=4,
    no_rope_layers=[1, 1, 1, 0],
    layer_types=[CHUNKED, CHUNKED, CHUNKED, FULL],
    interleave_moe_layer_step=2,
    intermediate_size_mlp=96,
    floor_scale=4,
    num_experts_per_tok=1,
)

OVERRIDES: dict[str, Overrides] = {
    "afmoe": dict(
        num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], num_dense_layers=1, mup_enabled=True
    ),
    "beam": dict(
        num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE]
    ),
    "cohere2_moe": dict(
        logit_scale=0.75,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE],
        prefix_dense_intermediate_size=80,
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=2.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": dict(num_hidden_layers=3, first_k_dense_replace=1, layer_types=[FULL, SLIDING, FULL]),
    "ernie4_5_moe": dict(num_hidden_layers=3, moe_layer_start_index=1, moe_layer_end_index=2),
    "exaone_moe": dict(
        num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE]
    ),
    "flint": dict(num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], mlp_only_layers=[0]),
    "glm4_moe": dict(num_hidden_layers=3, first_k_dense_replace=1, use_qk_norm=True),
    "gpt_oss": dict(layer_types=[SLIDING, FULL]),
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE | dict(layer_types=[SLIDING, FULL], layer_rope_theta=[10000.0, 500000.0]),
    "granitemoeshared": GRANITE,
    "hy_v3": dict(num_hidden_layers=3, mlp_layer_types=[DENSE, SPARSE, SPARSE]),
    "jetmoe": dict(kv_channels=16, num_key_value_heads=2),
    "kolibri1": dict(layer_types=[SLIDING, FULL]),
    "laguna": dict(
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        mlp_layer_types=[DENSE, SPARSE, SPARSE, DENSE],
        num_attention_heads_per_layer=[4, 8, 4, 8],
    ),
    "llama4": dict(
        text_config=LLAMA4_TEXT,
        vision_config=dict(projector_input_dim=64, projector_output_dim=64, vision_output_dim=64),
    ),
    "llama4_text": LLAMA4_TEXT,
    "mellum": dict(num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], mlp_layer_types=[DENSE, SPARSE, SPARSE]),
    "mimo_v2_flash": dict(
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        mlp_layer_types=[DENSE, SPARSE, SPARSE],
        head_dim=32,
        v_head_dim=16,
    ),
    "olmoe": dict(clip_qkv=2.0),
    "qwen2_moe": dict(
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        use_sliding_window=True,
        sliding_window=8,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": dict(num_hidden_layers=3, mlp_only_layers=[0]),
    "sarvam_moe": dict(num_hidden_layers=3, first_k_dense_replace=1),
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "mixtral": {"sliding": dict(sliding_window=8)},
}
