"""The length of texts that a config names."""

from __future__ import annotations

import pytest
from transformers import Gemma3Config, GPT2Config, LlamaConfig, PreTrainedConfig

from transfuse.models.lengths import longest_text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=77), 77),
        (GPT2Config(n_positions=33), 33),
        (Gemma3Config(text_config={"max_position_embeddings": 55}), 55),
        (PreTrainedConfig(), None),
        (PreTrainedConfig(max_seq_len=0, n_ctx=12), 12),
    ],
)
def test_it_goes_by_many_names(config: PreTrainedConfig, expected: int | None) -> None:
    assert longest_text(config) == expected
