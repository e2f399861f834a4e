"""A seam's implementation is switched in every config of a model, and given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from transfuse.layers.configs import implementation_of


def test_every_config_that_knows_the_seam_is_switched_and_given_back() -> None:
    shared, own, other = (
        SimpleNamespace(_attn_implementation="sdpa"),
        SimpleNamespace(_attn_implementation="eager"),
        SimpleNamespace(),
    )
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity())
    for module, config in zip(model, (shared, shared, own, other), strict=True):
        module.config = config
    with (
        pytest.raises(RuntimeError, match="breaks off"),
        implementation_of(model, "_attn_implementation", "another"),
    ):
        assert (shared._attn_implementation, own._attn_implementation) == ("another", "another")
        raise RuntimeError("breaks off")
    assert (shared._attn_implementation, own._attn_implementation) == ("sdpa", "eager")
    assert not vars(other)
