"""Small sizes for every config field that counts something, and the words that the families share."""

from __future__ import annotations

from typing import Any

Overrides = dict[str, Any]

# Kinds of layers, as `layer_types` and `mlp_layer_types` of Transformers configs spell them.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, LINEAR = "indexed_attention", "linear_attention"
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"  # attention and a state in one layer
DENSE, SPARSE = "dense", "sparse"

# fmt: off
# Applied to every config class that has a field of that name, sub-configs included.
SMALL: Overrides = dict(
    vocab_size=512,
    # width
    hidden_size=64, n_embd=64, d_model=64, emb_dim=64, embedding_dim=64, embedding_size=64,
    intermediate_size=96, n_inner=96, ffn_dim=96, d_ff=96, dff=96, dim_ff=96, d_inner=96, feed_forward_size=96,
    decoder_ffn_dim=96, encoder_ffn_dim=96, ffn_hidden_size=96, expansion_ratio=2, intermediate_multiple_size=2,
    # depth
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, num_blocks=2,
    decoder_layers=2, num_decoder_layers=2, encoder_layers=2, num_encoder_layers=2,
    # heads
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, attention_heads=4,
    decoder_attention_heads=4, encoder_attention_heads=4, num_decoder_attention_heads=4, num_encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=32, d_head=16, dim_head=16, d_kv=16, attention_head_size=16,
    # mixture of experts
    num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8,
    num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2, moe_k=2, moe_top_k=2,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1,
    moe_intermediate_size=32, shared_expert_intermediate_size=48, shared_intermediate_size=48,
    n_group=2, num_expert_group=2, topk_group=1,
    # state-space, linear attention, convolution
    mamba_d_state=8, mamba_d_conv=4, mamba_dt_rank=4, mamba_chunk_size=8, state_size=8, time_step_rank=4, chunk_size=8,
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_head_dim=16, linear_num_heads=4,
    # latent attention and its indexer (with fewer index heads, scores tie at 0 and top-k is ambiguous)
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    index_n_heads=16, index_head_dim=16, index_topk=8,
    # positions
    max_position_embeddings=512, n_positions=512, max_seq_len=512, n_ctx=512, context_length=512, rotary_dim=8,
    sliding_window=8, sliding_window_size=8, window_size=8, attention_window_size=8, attention_chunk_size=8,
    # decoding halves
    is_decoder=True,
    # specials and multimodal placeholders, out of the way of random prompts
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    sep_token_id=2, eod_token_id=2, cls_token_id=1,
    image_token_id=505, image_token_index=505, video_token_id=506, audio_token_id=507, vision_start_token_id=508,
    vision_end_token_id=509, boi_token_id=508, boi_token_index=508, eoi_token_id=509, eoi_token_index=509,
    boa_token_id=510, eoa_token_id=511, eoa_token_index=511,
)

# On top of SMALL in vision, audio and other non-text sub-configs.
SMALL_MODALITY: Overrides = dict(
    num_hidden_layers=1, depth=1, num_key_value_heads=4, head_dim=16, image_size=32, patch_size=16, out_hidden_size=64,
    num_channels=3, in_channels=3, text_hidden_size=64, sliding_window=8, num_filters=8, codebook_size=64,
    num_position_embeddings=16, num_mel_bins=8, max_source_positions=32,
)
# fmt: on

# Set only where the class default is not None: a None here turns a feature off.
PRESENT_ONLY = frozenset({"sliding_window", "sliding_window_size", "attention_chunk_size", "n_inner", "q_lora_rank"})

# Latent attention has as many key heads as query heads; `head_dim` is the rotary part.
MLA: Overrides = dict(num_key_value_heads=4, head_dim=8)
GRANITE: Overrides = dict(
    attention_multiplier=0.25, embedding_multiplier=2.0, logits_scaling=0.5, residual_multiplier=0.7
)
ROPE: Overrides = {"rope_type": "default", "rope_theta": 10000.0}
