"""Types with latent attention, and those with an indexer or compressor that picks what attention reads."""

from __future__ import annotations

from tests.zoo.data.sizes import DENSE, FULL, INDEXED, LINEAR, MLA, ROPE, SLIDING, SPARSE, Overrides

DOTS3_TEXT = MLA | dict(
    swa_num_attention_heads=2,
    swa_num_key_value_heads=2,
    swa_q_lora_rank=16,
    swa_kv_lora_rank=24,
    swa_head_dim=24,
    swa_qk_nope_head_dim=16,
    swa_v_head_dim=16,
    num_hidden_layers=4,
    layer_types=[INDEXED, SLIDING, INDEXED, SLIDING],
    mlp_layer_types=[DENSE, SPARSE, SPARSE, SPARSE],
    shared_experts_intermediate_size=48,
)
QWEN4_TEXT = dict(
    num_hidden_layers=4,
    layer_types=[LINEAR, INDEXED, LINEAR, INDEXED],
    hc_count=2,
    hc_lowrank=8,
    ple_layer_ids=[1, 3],
    ple_embed_dim=32,
    heads_per_ngram=2,
    ngram_vocab_size_base=256,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=2,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
    rope_parameters={**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
)

OVERRIDES: dict[str, Overrides] = {
    "axk1": MLA | dict(num_hidden_layers=3, mlp_layer_types=[DENSE, SPARSE, SPARSE]),
    "axk2": MLA
    | dict(num_hidden_layers=3, layer_types=[INDEXED] * 3, mlp_layer_types=[DENSE, SPARSE, SPARSE], gated_norm_rank=8),
    "deepseek_v2": MLA | dict(num_hidden_layers=3, first_k_dense_replace=1, topk_method="group_limited_greedy"),
    "deepseek_v3": MLA | dict(num_hidden_layers=3, first_k_dense_replace=1),
    "deepseek_v32": MLA | dict(num_hidden_layers=3, layer_types=[INDEXED] * 3, mlp_layer_types=[DENSE, SPARSE, SPARSE]),
    "deepseek_v4": dict(
        num_hidden_layers=4,
        num_key_value_heads=1,
        o_groups=2,
        o_lora_rank=16,
        partial_rotary_factor=0.25,
        hc_mult=2,
        layer_types=[
            SLIDING,
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "hash_moe"],
        index_topk=3,
    ),
    "dots3_note": dict(
        text_config=DOTS3_TEXT,
        vision_config=dict(adapter_in_dim=64, adapter_out_dim=64, mlp_layer_types=[DENSE]),
        audio_config=dict(adapter_input_size=64, adapter_out_dim=64, conv_output_size=480, downsample_hidden_size=8),
    ),
    "dots3_note_text": DOTS3_TEXT,
    "glm4_moe_lite": MLA | dict(num_hidden_layers=3, mlp_layer_types=[DENSE, SPARSE, SPARSE]),
    "glm_moe_dsa": MLA
    | dict(
        num_hidden_layers=4,
        layer_types=[INDEXED] * 4,
        mlp_layer_types=[DENSE, SPARSE, SPARSE, SPARSE],
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "hy_v4": MLA
    | dict(
        num_hidden_layers=4,
        layer_types=[INDEXED] * 4,
        mlp_layer_types=[DENSE, SPARSE, SPARSE, SPARSE],
        hc_mult=2,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "longcat_flash": MLA | dict(zero_expert_num=4, expert_ffn_hidden_size=32, ffn_hidden_size=96),
    "minicpm3": MLA | dict(dim_model_base=32),
    "minimax_m3_vl_text": dict(
        num_hidden_layers=3,
        layer_types=[FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=[DENSE, SPARSE, SPARSE],
        index_n_heads=2,
        index_block_size=4,
        index_topk_blocks=2,
        dense_intermediate_size=96,
        rotary_dim=16,
    ),
    "qwen4_exp": dict(text_config=QWEN4_TEXT),
    "qwen4_exp_text": QWEN4_TEXT,
    "sarvam_mla": MLA | dict(num_hidden_layers=3, first_k_dense_replace=1),
    "youtu": MLA,
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "deepseek_v2": {"no_q_lora": dict(q_lora_rank=None, topk_method="greedy")},
    "deepseek_v3": {"no_q_lora": dict(q_lora_rank=None)},
    "qwen4_exp_text": {"no_ple": dict(ple_layer_ids=[])},
}
