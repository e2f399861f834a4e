"""Blocks of every type that is decoded here give the very numbers that llama.cpp's package gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from transfuse.models.gguf_blocks import DECODERS


@pytest.mark.parametrize("type_id", DECODERS, ids=lambda type_id: GGMLQuantizationType(type_id).name)
def test_random_blocks(type_id: int) -> None:
    kind = GGMLQuantizationType(type_id)
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(type_id).integers(0, 256, (500, num_bytes), dtype=np.uint8)
    expected = quants.dequantize(blocks.reshape(1, -1), kind).reshape(-1, elements)
    found = DECODERS[type_id](torch.from_numpy(blocks)).numpy()
    assert found.dtype == np.float32
    # Random scales include infinities and NaN.
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.9
