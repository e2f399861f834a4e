"""Gemma types from the second generation on: windows, soft caps, shared key-value layers, drafters."""

from __future__ import annotations

from tests.zoo.data.sizes import FULL, SLIDING, Overrides

GEMMA3N_TEXT = dict(
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    num_kv_shared_layers=2,
    intermediate_size=[96] * 4,
    activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=512,
    laurel_rank=8,
    altup_num_inputs=3,
)
GEMMA4_UNIFIED_TEXT = dict(
    num_hidden_layers=6,
    layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    num_kv_shared_layers=2,
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    use_double_wide_mlp=True,
    final_logit_softcapping=30.0,
)
GEMMA4_TEXT = GEMMA4_UNIFIED_TEXT | dict(
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=512,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=32,
)
GEMMA4_DRAFTER = dict(
    num_hidden_layers=2,
    layer_types=[SLIDING, FULL],
    num_kv_shared_layers=2,
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
)

OVERRIDES: dict[str, Overrides] = {
    "gemma2": dict(layer_types=[SLIDING, FULL], query_pre_attn_scalar=24),
    "gemma3": dict(text_config=dict(layer_types=[SLIDING, FULL], query_pre_attn_scalar=24), mm_tokens_per_image=4),
    "gemma3_text": dict(layer_types=[SLIDING, FULL], query_pre_attn_scalar=24),
    "gemma3n": dict(
        text_config=GEMMA3N_TEXT,
        vision_config=dict(architecture="test_efficientnet", vocab_size=16, vocab_offset=480),
        audio_config=dict(
            vocab_size=16,
            vocab_offset=496,
            conf_num_hidden_layers=1,
            conf_num_attention_heads=4,
            sscp_conv_channel_size=(8, 4),
            input_feat_size=16,
        ),
    ),
    "gemma3n_text": GEMMA3N_TEXT,
    "gemma4": dict(text_config=GEMMA4_TEXT),
    "gemma4_assistant": dict(
        text_config=GEMMA4_DRAFTER
        | dict(
            model_type="gemma4_text",
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
            num_experts=None,
            moe_intermediate_size=None,
        ),
        backbone_hidden_size=64,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    ),
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_unified": dict(text_config=GEMMA4_UNIFIED_TEXT),
    "gemma4_unified_assistant": dict(
        text_config=GEMMA4_DRAFTER | dict(model_type="gemma4_unified_text"),
        backbone_hidden_size=64,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    ),
    "gemma4_unified_text": GEMMA4_UNIFIED_TEXT,
    "vaultgemma": dict(layer_types=[SLIDING, FULL], query_pre_attn_scalar=24),
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "gemma2": {"full": dict(layer_types=[FULL, FULL])},
    "gemma4_text": {
        "dense": dict(enable_moe_block=False, num_experts=None, moe_intermediate_size=None, top_k_experts=None),
        "no_sharing": dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0, use_double_wide_mlp=False),
    },
}
