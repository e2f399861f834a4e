"""What only looks like a pattern is left alone, and still computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.fusion import near_misses as near
from tests.unit.fusion.conftest import Fused, hidden, names, randomise, reasons
from transfuse import fuse


@pytest.mark.parametrize(
    "module",
    [near.MeanOverTokens, near.SquareOfAnother, near.EpsOutside, near.SumInsteadOfMean, near.RememberingNorm],
)
def test_norms_that_are_none(module: type[nn.Module], fused_alike: Fused) -> None:
    assert names(fused_alike(module(), hidden())) == []


def test_a_norm_that_takes_several_paths(one_thread: None) -> None:
    module = near.NormByLength()
    randomise(module)
    expected = module(hidden(9))
    plan = fuse(module, (hidden(5),))
    assert names(plan) == []
    torch.testing.assert_close(module(hidden(9)), expected)


def test_what_a_norm_remembers(one_thread: None) -> None:
    module = near.RememberingNorm()
    fuse(module, (hidden(),))
    x = hidden()
    module(x)
    assert module.last is x


@pytest.mark.parametrize("module", [near.Rebound, near.ChangedInPlace])
def test_projections_of_different_inputs(module: type[nn.Module], fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden(), train=module is not near.ChangedInPlace)
    assert names(plan) == ["linear", "linear"]


def test_an_input_that_may_be_bound_anew(one_thread: None) -> None:
    module = near.ReboundSometimes()
    expected = module(hidden(), shift=True)
    plan = fuse(module, (hidden(),))
    assert names(plan) == ["linear", "linear"]
    assert "x may be another tensor by then" in reasons(plan)
    torch.testing.assert_close(module(hidden(), shift=True), expected)


def test_a_layer_that_is_called_twice(fused_alike: Fused) -> None:
    plan = fused_alike(near.CalledTwice(), hidden())
    assert plan.num_fused_linears == plan.num_linears == 3


@pytest.mark.parametrize("module", [near.GateUsedTwice, near.OtherInputs, near.BothActivated, near.UnevenClamp])
def test_products_that_are_no_gated_units(module: type[nn.Module], fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden())
    assert "glu" not in names(plan)
    assert plan.num_fused_linears == plan.num_linears == 3


def test_a_gate_that_another_branch_uses(one_thread: None) -> None:
    module = near.GateUsedInAnotherBranch()
    expected = module(hidden(), bare=True)
    plan = fuse(module, (hidden(),))
    assert "glu" not in names(plan)
    torch.testing.assert_close(module(hidden(), bare=True), expected)


def test_dropout_stays_between(one_thread: None) -> None:
    module = near.DropoutBetween().train()
    x = hidden()
    torch.manual_seed(5)
    expected = module(x)
    plan = fuse(module, (x,))
    assert "glu" not in names(plan)
    torch.manual_seed(5)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("module", [near.SumChangedInPlace, near.Broadcast])
def test_sums_that_are_no_residuals(module: type[nn.Module], fused_alike: Fused) -> None:
    assert names(fused_alike(module(), hidden())) == ["norm"]


def test_a_turn_that_is_none(fused_alike: Fused) -> None:
    cos, sin = torch.rand(5, 8), torch.rand(5, 8)
    plan = fused_alike(near.HalfTurn(), hidden(), cos, sin)
    assert names(plan) == ["linear"]
    assert "rotates in a way of its own" in reasons(plan)
