"""Experts that declare no seam are found by what they make of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fusion import expert_models as models
from tests.unit.fusion.conftest import Fused, fusions, hidden, names, randomise, reasons
from tests.zoo import build
from tests.zoo.fusions import row_of
from transfuse import fuse, unfuse
from transfuse.fusion.apply import analyse
from transfuse.kernels.torch_ops import executions
from transfuse.trace.recorder import record


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (models.OwnExperts, {"activation": "silu", "layout": "halves", "identity": False, "num_experts": 6}),
        (models.SwappedExperts, {"activation": "gelu", "layout": "swapped"}),
        (models.ClampedExperts, {"activation": "silu", "layout": "interleaved", "limit": 0.5, "offset": 1.0}),
        (models.FlatExperts, {"activation": "silu", "layout": "halves", "num_experts": 6}),
        (models.TransposedExperts, {"activation": "relu2", "layout": None}),
    ],
)
def test_experts_of_their_own(module: type[nn.Module], settings: dict[str, Any], fused_alike: Fused) -> None:
    executions.clear()
    plan = fused_alike(models.Block(module()), hidden())
    found = next((fusion for fusion in fusions(plan) if fusion.fuser == "experts"), None)
    assert found is not None, reasons(plan)
    assert {key: found.details[key] for key in settings} == settings
    assert executions["experts"] == 1


def test_experts_that_hand_tokens_on(fused_alike: Fused) -> None:
    plan = fused_alike(models.Block(models.IdleExperts(), models.EXPERTS + 3), hidden())
    found = next((fusion for fusion in fusions(plan) if fusion.fuser == "experts"), None)
    assert found is not None, reasons(plan)
    assert found.details["identity"] is True


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (models.NormedExperts, "runs its experts in a way of its own"),
        (models.LastExpertDiffers, "runs its experts in a way of its own"),
        (models.DroppingExperts, "does more than run experts"),
        (models.CountingExperts, "does more than run experts"),
    ],
)
def test_what_only_looks_like_experts(module: type[nn.Module], reason: str, fused_alike: Fused) -> None:
    block = models.Block(module()).eval()
    plan = fused_alike(block, hidden())
    assert "experts" not in names(plan)
    assert f"experts: {module.__name__} {reason}" in reasons(plan)


def test_experts_that_all_run(fused_alike: Fused) -> None:
    plan = fused_alike(models.DenseBlock(), hidden())
    found = next((fusion for fusion in fusions(plan) if fusion.fuser == "experts"), None)
    assert found is not None, reasons(plan)
    assert (found.details["top_k"], found.details["weigh_inputs"]) == (models.TOP, True)
    assert "linear_function" in names(plan)


@pytest.mark.parametrize("module", [models.ThresholdBlock, models.WeighedAfterwards])
def test_experts_that_have_to_run(module: type[nn.Module], fused_alike: Fused) -> None:
    plan = fused_alike(module(), hidden())
    assert "experts" not in names(plan)
    assert "experts: all experts run on all tokens" in reasons(plan)


def test_weights_that_would_not_fit(one_thread: None) -> None:
    experts = models.OwnExperts()
    with torch.device("meta"):
        experts.count, size = 4096, 1024
        experts.w13 = nn.Parameter(torch.zeros(experts.count, 2 * size, size))  # 34 GB
        experts.w2 = nn.Parameter(torch.zeros(experts.count, size, size))
        x, chosen, weights = torch.zeros(5, size), torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, 2)
        recorded = record(experts, lambda _: experts(x, chosen, weights))
    plan = analyse(recorded).plan
    assert "experts" in names(plan), reasons(plan)


@pytest.mark.parametrize("name", ["dbrx", "longcat_flash", "llama4_text", "phimoe"])
def test_models_of_transformers(name: str, one_thread: None) -> None:
    row = row_of(name)
    assert row.error is None
    assert row.is_whole
    assert row.miscounted == {}
    assert row.patterns["experts"] > 0


def test_a_router_that_draws_in_training(one_thread: None) -> None:
    model = build("phimoe")
    router = model.model.layers[0].mlp.router
    x = hidden(size=router.weight.shape[1]).flatten(0, 1)
    randomise(router)
    plan = fuse(router, (x,))
    assert "router" in names(plan), reasons(plan)
    for training in (False, True):
        router.train(training)
        found, expected = [], []
        for results in (found, expected):
            if results is expected:
                unfuse(router)
            torch.manual_seed(0)
            executions.clear()
            results += [*router(x.clone()), executions["route"]]
            if results is expected:
                fuse(router, (x,))
        assert found[-1] == (0 if training else 1)
        assert expected[-1] == 0
        torch.testing.assert_close(found[:-1], expected[:-1])
