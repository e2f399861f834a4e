from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from transfuse.errors import UnsupportedModelError
from transfuse.layers.packed_attention import PackedMask, attending_within, packed_attention_forward, packed_mask
from transfuse.layers.ragged_mask import ForeignMask


@pytest.mark.parametrize(
    ("function", "size", "reach"),
    [
        (bidirectional_mask_function, None, (-1, -1)),
        (causal_mask_function, None, (-1, 0)),
        (sliding_window_bidirectional_mask_function(4), 4, (4, 4)),
        (sliding_window_causal_mask_function(4), 4, (3, 0)),
    ],
)
def test_masks_say_how_far_a_token_sees(function: Any, size: int | None, reach: tuple[int, int]) -> None:
    mask = packed_mask(mask_function=function, local_size=size)
    assert isinstance(mask, PackedMask)
    assert mask.reach == reach


def test_another_mask_is_refused_when_it_is_used() -> None:
    mask = packed_mask(mask_function=chunked_causal_mask_function(4, torch.zeros(1)), local_size=4)
    assert isinstance(mask, ForeignMask)
    with pytest.raises(UnsupportedModelError, match="masks attention by"):
        _attend(mask)


@pytest.mark.parametrize(
    ("mask", "more", "message"),
    [
        (None, {}, "gives attention no mask"),
        (torch.ones(1), {}, "a mask of its own"),
        (PackedMask(), {"position_bias": torch.ones(1)}, "passes position_bias"),
        (PackedMask(), {"dropout": 0.1}, "dropout"),
    ],
)
def test_what_would_change_the_result_is_refused(mask: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _attend(mask, **more)


def test_texts_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 2, 5, 4)
    found = _attend(PackedMask(sees_ahead=True), rows)
    for part in (slice(0, 2), slice(2, 5)):
        alone = nn.functional.scaled_dot_product_attention(*[rows[:, :, part]] * 3)
        torch.testing.assert_close(found[:, part], alone.transpose(1, 2))


def _attend(mask: Any, rows: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    rows = torch.zeros(1, 2, 5, 4) if rows is None else rows
    with attending_within(torch.tensor([0, 2, 5], dtype=torch.int32)):
        return packed_attention_forward(nn.Identity(), rows, rows, rows, mask, **more)[0]
