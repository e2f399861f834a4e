"""Models that nobody has seen fuse by what they compute, whatever they call things."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.fusion import custom_models as models
from tests.unit.fusion.conftest import Fused, fusions, hidden, names, reasons
from transfuse import fuse, unfuse
from transfuse.kernels.torch_ops import executions


@pytest.mark.parametrize(
    ("norm", "kernel"),
    [
        (models.OffsetNorm, "rms_norm"),
        (models.BareNorm, "rms_norm"),
        (models.LibraryNorm, "rms_norm"),
        (models.WrittenLayerNorm, "layer_norm"),
        (lambda: nn.LayerNorm(32, bias=False), "layer_norm"),
        (lambda: nn.RMSNorm(32, eps=1e-6), "rms_norm"),
    ],
)
def test_norms(norm: type[nn.Module], kernel: str, fused_alike: Fused) -> None:
    plan = fused_alike(norm(), hidden())
    assert [fusion.kernels for fusion in fusions(plan)] == [(kernel,)]


@pytest.mark.parametrize(
    ("module", "activation", "norm_first"),
    [(models.GateAfterNorm, "silu", True), (models.GateBeforeNorm, "sigmoid", False)],
)
def test_gated_norms(module: type[nn.Module], activation: str, norm_first: bool, fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden(), hidden().flip(1))
    assert [fusion.fuser for fusion in fusions(plan)] == ["gated_norm"], reasons(plan)
    details = fusions(plan)[0].details
    assert (details["activation"], details["norm_first"]) == (activation, norm_first)


def test_projections_of_short_names(fused_alike: Fused) -> None:
    plan = fused_alike(models.ShortNames(), hidden())
    assert names(plan) == ["linear", "qkv"]
    qkv = next(fusion for fusion in fusions(plan) if fusion.fuser == "qkv")
    assert qkv.children == ("wq", "wk", "wv")
    assert qkv.merged == (("wq.weight", "wk.weight", "wv.weight"), ("wq.bias", "wk.bias", "wv.bias"))
    assert set(qkv.sharding.values()) == {"column"}


@pytest.mark.parametrize("has_value", [False, True])
def test_a_projection_that_may_be_missing(has_value: bool, fused_alike: Fused) -> None:
    plan = fused_alike(models.OptionalValue(has_value), hidden())
    assert names(plan) == ["qkv"], reasons(plan)
    assert plan.num_fused_linears == plan.num_linears == 2 + has_value


def test_an_early_return_still_returns(one_thread: None) -> None:
    module = models.OptionalValue(True)
    expected = module(hidden(), only_query=True)
    fuse(module, (hidden(),))
    torch.testing.assert_close(module(hidden(), only_query=True), expected)


@pytest.mark.parametrize(("interleaved", "sizes", "groups"), [(False, "32+16+16", 1), (True, "16+8+8", 2)])
def test_packed_projections(interleaved: bool, sizes: str, groups: int, fused_alike: Fused) -> None:
    plan = fused_alike(models.Packed(interleaved), hidden())
    assert names(plan) == ["linear", "packed_qkv"]
    packed = next(fusion for fusion in fusions(plan) if fusion.fuser == "packed_qkv")
    assert packed.details == {"sizes": sizes, "groups": groups}
    assert packed.sharding == {"qkv": "column"}


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (models.InlineGlu, "silu"),
        (models.SwappedGlu, "gelu_tanh"),
        (models.SigmoidGlu, "silu"),
        (models.ClampedGlu, "quick_gelu"),
    ],
)
def test_gated_linear_units(module: type[nn.Module], activation: str, fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden())
    assert names(plan) == ["glu", "linear"], reasons(plan)
    glu = next(fusion for fusion in fusions(plan) if fusion.fuser == "glu")
    assert (glu.children, glu.details["activation"]) == (("w1", "w3"), activation)


@pytest.mark.parametrize(
    ("module", "layout"),
    [(models.HalvesGlu, "halves"), (models.SecondHalfGlu, "swapped"), (models.InterleavedGlu, "interleaved")],
)
def test_packed_gated_linear_units(module: type[nn.Module], layout: str, fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden())
    assert names(plan) == ["glu", "linear"], reasons(plan)
    assert next(f for f in fusions(plan) if f.fuser == "glu").details["layout"] == layout


def test_an_activation_of_its_own_and_turned_weights(fused_alike: Fused) -> None:
    plan = fused_alike(models.PlainMlp(), hidden())
    assert names(plan) == ["linear", "mlp"], reasons(plan)
    assert plan.num_fused_linears == plan.num_linears == 2


def test_linear_layers_in_loops_and_containers(fused_alike: Fused) -> None:
    plan = fused_alike(models.Stack(), hidden())
    assert plan.num_fused_linears == plan.num_linears == 6


def test_parallel_blocks(fused_alike: Fused) -> None:
    plan = fused_alike(models.Parallel(), hidden())
    assert names(plan) == ["glu", "linear", "linear", "norm", "norm", "qkv", "residual_norm"], reasons(plan)


def test_sandwiched_norms(fused_alike: Fused) -> None:
    plan = fused_alike(models.Sandwich(), hidden())
    assert names(plan).count("residual_norm") == 1, reasons(plan)
    assert plan.num_fused_linears == plan.num_linears == 6


def test_what_the_plan_claims_is_what_runs(one_thread: None) -> None:
    module = models.Sandwich()
    plan = fuse(module, (hidden(),))
    claimed = [kernel for fusion in fusions(plan) for kernel in fusion.kernels]
    executions.clear()
    with torch.no_grad():
        module(hidden())
    # The norm whose sum is computed with it is no longer called by itself.
    claimed.remove("rms_norm")
    assert {kernel: executions[kernel] for kernel in set(claimed)} == {k: claimed.count(k) for k in set(claimed)}
    unfuse(module)
