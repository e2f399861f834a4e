"""What `Cache.layers` tells: which layers have memory, and nothing of what is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transfuse.errors import UnsupportedModelError
from transfuse.layers.listed_layers import ListedLayer


def test_memory_has_a_size_above_zero() -> None:
    for memory in (ListedLayer(True).keys, ListedLayer(True).values):
        assert memory is not None
        assert memory.numel() > 0
        assert memory.numel() != 0
        assert memory.numel()


def test_layers_without_memory_have_no_keys() -> None:
    layer = copy.deepcopy(ListedLayer(False))
    assert (layer.is_initialized, layer.keys, layer.values) == (False, None, None)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.cumulative_length,
        lambda layer: layer.get_seq_length(),
        lambda layer: layer.keys.shape,
        lambda layer: layer.values.to(torch.float32),
        lambda layer: layer.keys.numel() > 64,
        lambda layer: layer.keys.numel() == 64,
        lambda layer: layer.keys.numel().bit_length(),
    ],
)
def test_all_else_is_refused(use: Callable[[Any], object]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cache layer|Cache\.layers"):
        use(ListedLayer(True))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.keys[0],
        lambda layer: torch.cat((layer.keys, torch.zeros(1))),
        lambda layer: layer.keys.numel() + 1,
        lambda layer: torch.zeros(layer.keys.numel()),
        lambda layer: layer.keys.numel() < 3,
    ],
)
def test_what_cannot_be_computed_with_raises(use: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        use(ListedLayer(True))
