"""Routers are found by what they choose, and experts by the seam that they declare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fusion import mixtures
from tests.unit.fusion.conftest import Fused, fusions, hidden, names, randomise, reasons
from tests.zoo import build
from transfuse import fuse, unfuse
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.kinds import install, uninstall
from transfuse.kernels.torch_ops import executions

SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"scoring": "softmax", "normalise": True},
    "qwen3_moe": {"scoring": "softmax", "normalise": False},
    "granitemoe": {"scoring": "softmax", "normalise": True},
    "gpt_oss": {"scoring": "softmax", "normalise": True},
    "afmoe": {"bias": "expert_bias", "scoring": "sigmoid", "eps": 1e-20},
    "glm4_moe": {"bias": "self.e_score_correction_bias", "scoring": "sigmoid", "normalise": True},
    "ernie4_5_moe": {"bias": "self.moe_statics.e_score_correction_bias.flatten()", "floor": 1e-12},
    "hunyuan_v1_moe": {"scoring": "softmax", "normalise": True},
    "hy_v3": {"scale": 2.826, "scoring": "sigmoid"},
    "kolibri1": {"late": True, "scoring": "sigmoid"},
    "gemma4_text": {"expert_scale": "self.per_expert_scale"},
    "dbrx": {"scoring": "softmax", "normalise": True},
    "phimoe": {"scoring": "sparsemixer", "cutoff": 0.02},
    "deepseek_v4": {"scoring": "sqrt_softplus", "normalise": True, "bias": "self.e_score_correction_bias"},
    "deepseek_v2": {"num_groups": 2, "best_two": False, "fill": 0.0},
    "deepseek_v3": {"num_groups": 2, "best_two": True, "fill": None, "scale": 2.5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_routers_of_transformers(name: str, one_thread: None) -> None:
    plan = analyse_model(build(name)).plan
    found = next(fusion for fusion in fusions(plan) if fusion.fuser == "router")
    assert {key: found.details[key] for key in SETTINGS[name]} == SETTINGS[name]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {"activation": "silu", "layout": "halves", "is_transposed": False}),
        ("gpt_oss", {"activation": "quick_gelu", "layout": "interleaved", "limit": 7.0, "is_transposed": True}),
    ],
)
def test_experts_that_declare_themselves(name: str, settings: dict[str, Any], one_thread: None) -> None:
    model = build(name)
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        expected = model(ids).logits
    analysis = analyse_model(model)
    found = next(fusion for fusion in fusions(analysis.plan) if fusion.fuser == "experts")
    assert {key: found.details[key] for key in settings} == settings
    before = install(model, analysis)
    executions.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    uninstall(before)
    assert executions["experts"] == executions["route"] == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (mixtures.SoftmaxMixture, {"scoring": "softmax", "normalise": True}),
        (mixtures.LateSigmoidMixture, {"scoring": "sigmoid", "late": True, "bias": "self.correction", "scale": 1.5}),
        (mixtures.GroupedMixture, {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}),
    ],
)
def test_routers_among_other_statements(module: type[nn.Module], settings: dict[str, Any], fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden(), tolerance=1e-4)
    found = next(fusion for fusion in fusions(plan) if fusion.fuser == "router")
    assert {key: found.details[key] for key in settings} == settings
    assert names(plan) == ["experts", "linear", "router"], reasons(plan)


def test_scores_that_are_needed_besides_stay(fused_alike: Fused) -> None:
    plan = fused_alike(mixtures.ObservedMixture(), hidden(), tolerance=1e-4)
    assert "router" in names(plan), reasons(plan)


def test_a_rule_of_its_own_is_left_alone(fused_alike: Fused) -> None:
    plan = fused_alike(mixtures.SoftplusMixture(), hidden(), tolerance=1e-4)
    assert "router" not in names(plan)
    assert "it routes in a way of its own" in reasons(plan)


def test_what_else_a_router_does_is_kept(one_thread: None) -> None:
    module = mixtures.CountingMixture()
    randomise(module)
    plan = fuse(module, (hidden(),))
    assert "router" not in names(plan)
    module(hidden())
    assert module.calls == 1
    unfuse(module)


def test_what_is_not_all_that_a_linear_layer_gives(one_thread: None) -> None:
    plan = analyse_model(build("inkling_text")).plan
    assert "router: what it chooses from is not all that a linear layer gives" in reasons(plan)
    assert "router" not in names(plan)
