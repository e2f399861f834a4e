"""Types whose config nests others: encoder halves, vision, audio, byte patches."""

from __future__ import annotations

from tests.zoo.data.sizes import Overrides

MUSICGEN = dict(
    text_encoder=dict(num_key_value_heads=4),
    audio_encoder=dict(hidden_size=16, codebook_dim=16, num_filters=4),
    decoder=dict(pad_token_id=0, bos_token_id=1),
)

OVERRIDES: dict[str, Overrides] = {
    "bigbird_pegasus": dict(attention_type="original_full"),
    "blt": dict(
        num_hidden_layers=2,
        encoder_hash_byte_group_vocab=128,
        encoder_hash_byte_group_size=[3, 4],
        encoder_config=dict(hidden_size_global=128, num_hidden_layers=1, num_key_value_heads=4),
        decoder_config=dict(hidden_size_global=128),
        global_config=dict(hidden_size=128, encoder_cross_output_size=None),
        patcher_config=dict(num_hidden_layers=1),
    ),
    "emu3": dict(
        vq_config=dict(
            base_channels=32, channel_multiplier=(1, 1), num_res_blocks=1, latent_channels=4, num_attention_heads=1
        ),
        vocabulary_map={"<image>": 505},
    ),
    "got_ocr2": dict(vision_config=dict(mlp_dim=96, output_channels=16, window_size=2, global_attn_indexes=(0,))),
    "mllama": dict(
        text_config=dict(num_hidden_layers=3, cross_attention_layers=[1]),
        vision_config=dict(
            attention_heads=4,
            intermediate_layers_indices=[0],
            num_global_layers=1,
            vision_output_dim=128,
            max_num_tiles=2,
            supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
        ),
    ),
    "moshi": dict(
        audio_encoder_config=dict(num_hidden_layers=1, codebook_dim=16, vector_quantization_hidden_dimension=16),
        depth_decoder_config=dict(hidden_size=64, input_size=64, num_codebooks=2, audio_vocab_size=64),
        num_codebooks=2,
        audio_vocab_size=64,
        sliding_window=512,
    ),
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "phi4_multimodal": dict(
        vision_config=dict(crop_size=32),
        audio_config=dict(
            num_blocks=1,
            ext_pw_out_channel=64,
            depthwise_separable_out_channel=64,
            nemo_conv_channels=8,
            nemo_final_size=10,
            input_size=80,
        ),
    ),
    "prophetnet": dict(num_buckets=8, relative_max_distance=32),
    "whisper": dict(max_source_positions=16, max_target_positions=512, num_mel_bins=8, begin_suppress_tokens=None),
}

VARIANTS: dict[str, dict[str, Overrides]] = {
    "prophetnet": {"no_relative_bias": {}},  # differs in how its weights are drawn: init_styles.py
}
