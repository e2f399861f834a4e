from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)

from transfuse.errors import UnsupportedModelError
from transfuse.layers.attention import ATTENTION_NAME, paged_attention_forward
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_mask import ForeignMask, RaggedMask, ragged_mask


def test_causal() -> None:
    assert ragged_mask(mask_function=causal_mask_function, q_length=3, dtype=None) == RaggedMask(None)


def test_sliding_window() -> None:
    assert ragged_mask(mask_function=sliding_window_causal_mask_function(7), local_size=7) == RaggedMask(7)


@pytest.mark.parametrize(
    ("function", "local_size"),
    [
        (sliding_window_causal_mask_function(7), 8),
        (sliding_window_causal_mask_function(7), None),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
        (or_masks(causal_mask_function, lambda b, h, q, k: q == 0), None),
        (and_masks(causal_mask_function, lambda b, h, q, k: q != k), None),
        (lambda b, h, q, k: k <= q, None),
    ],
)
def test_other_patterns_are_refused(function: object, local_size: int | None) -> None:
    mask = ragged_mask(mask_function=function, local_size=local_size)
    uses = (mask.refuse, lambda: mask[0], lambda: mask + 1, lambda: mask.dtype, lambda: _attend(mask))
    for use in uses:
        with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
            use()


def _attend(mask: object) -> None:
    paged_attention_forward(torch.nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), mask)


def _config() -> LlamaConfig:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, sliding_window=5)
    config._attn_implementation = ATTENTION_NAME
    AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)
    return config


def test_transformers_own_functions_make_it() -> None:
    arguments = {
        "config": _config(),
        "inputs_embeds": torch.zeros(1, 4, 8),
        "attention_mask": None,
        "cache": LayerProbe(),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }
    assert create_causal_mask(**arguments) == RaggedMask(None)
    assert create_sliding_window_causal_mask(**arguments) == RaggedMask(5)
    foreign = create_causal_mask(**arguments, and_mask_function=lambda b, h, q, k: q != k)
    assert isinstance(foreign, ForeignMask), "it may never be used"


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.shape,
        lambda m: m[:, :, :, :3],
        lambda m: m + 1,
        lambda m: m & m,
        lambda m: m.to(torch.float32),
        lambda m: ~m,
    ],
)
def test_computing_with_it_raises(use: object) -> None:
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        use(RaggedMask())


def test_it_can_be_copied_and_compared() -> None:
    assert copy.deepcopy(RaggedMask(3)) == RaggedMask(3) != RaggedMask(4)
