"""Experts that are modules of a list are found by what the loop around them gives, whatever it looks like."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fusion import expert_lists as models
from tests.unit.fusion.conftest import Fused, fusions, hidden, names, randomise, reasons
from transfuse import fuse, unfuse
from transfuse.fusion.apply import analyse
from transfuse.fusion.plan import Fusion, FusionPlan
from transfuse.kernels.torch_ops import executions
from transfuse.trace.recorder import record


def experts_of(plan: FusionPlan) -> Fusion:
    found = next((fusion for fusion in fusions(plan) if fusion.fuser == "experts"), None)
    assert found is not None, reasons(plan)
    return found


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (models.Masked, {"activation": "silu", "layout": "halves", "weigh_inputs": False, "num_experts": 6}),
        (models.PackedMasked, {"activation": "gelu", "layout": "swapped"}),
        (models.PlainMasked, {"activation": "gelu", "layout": None}),
        (models.Hit, {"activation": "silu", "num_experts": 6}),
        (models.Dense, {}),
        (models.Sorted, {}),
        (models.WithoutGradients, {}),
        (models.Arrays, {}),
        (models.Repeated, {}),
        (models.Weighed, {"weigh_inputs": True}),
        (models.ListedBlock, {}),
        (models.Looped, {}),
    ],
)
def test_loops_over_experts(module: type[nn.Module], settings: dict[str, Any], fused_alike: Fused) -> None:
    executions.clear()
    block = module()
    plan = fused_alike(block, hidden())
    found = experts_of(plan)
    assert {key: found.details[key] for key in settings} == settings
    assert (executions["experts"], executions["route"]) == (1, 1)
    assert len(found.children) == models.EXPERTS
    # Nothing below the experts is computed in another way besides.
    common = ["glu", "linear"] if hasattr(block, "common") and "common" in source_of(plan, block) else []
    assert names(plan) == sorted(["experts", "linear", "router", *common])
    assert plan.num_fused_linears == plan.num_linears


def source_of(plan: FusionPlan, module: nn.Module) -> str:
    return next(kind.original or "" for kind in plan.kinds if kind.module_class == type(module).__name__)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (models.Capped, "Capped runs its experts in a way of its own"),
        (models.CappedAtMany, "CappedAtMany runs its experts in a way of its own"),
        (models.CappedBeyondTrying, "CappedBeyondTrying may do otherwise for 10000000 tokens"),
        (models.Compared, "Compared compares numbers while it runs its experts"),
        (models.Limited, "Limited limits numbers while it runs its experts"),
        (models.Noisy, "Noisy runs its experts otherwise in training"),
        (models.Counting, "Counting does more than run experts"),
        (models.Counted, "Counted does more than run experts"),
        (models.Telling, "Telling does more than run experts"),
        (models.NormedOutputs, "NormedOutputs calls self.norm while it runs its experts"),
        (models.LastIsStronger, "LastIsStronger runs its experts in a way of its own"),
        (models.LastIsLarger, "its experts are of several kinds"),
        (models.Hooked, "its experts have hooks or forwards of their own"),
        (models.Constant, "Constant runs its experts in a way of its own"),
        (models.Mixed, "Mixed runs its experts in a way of its own"),
        (models.DroppingMasked, "Dropping is no feed-forward of linear layers"),
    ],
)
def test_loops_that_do_something_else(module: type[nn.Module], reason: str, fused_alike: Fused) -> None:
    plan = fused_alike(module().eval(), hidden())
    assert "experts" not in names(plan)
    assert f"experts: {reason} (expert_lists.py:" in reasons(plan)


def test_code_that_does_more_is_not_tried(capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    block = models.Telling()
    fuse(block, (hidden(),))
    assert len(capsys.readouterr().out.split()) == models.EXPERTS  # when it was recorded
    assert not any(vars(type(block)).get(name) for name in ("specialists_w2_weight",))


def test_names_and_parameters_stay(one_thread: None) -> None:
    block = models.Masked()
    randomise(block)
    before = copy.deepcopy(block.state_dict())
    parameters = dict(block.named_parameters())
    plan = fuse(block, (hidden(),))
    assert {name: id(p) for name, p in block.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert block.state_dict().keys() == before.keys()
    assert all(torch.equal(block.state_dict()[name], tensor) for name, tensor in before.items())
    # Rows of one storage, in the order of the experts.
    joined = block.experts_w1_w3_weight.view(models.EXPERTS, 2, models.INNER, -1)
    for index, expert in enumerate(block.experts):
        assert joined[index, 0].data_ptr() == expert.w1.weight.data_ptr()
        assert joined[index, 1].data_ptr() == expert.w3.weight.data_ptr()
    other = {name: tensor + 1 for name, tensor in before.items()}
    expected = models.Masked()
    expected.load_state_dict(other)
    block.load_state_dict(other)
    torch.testing.assert_close(block(hidden()), expected(hidden()), atol=1e-4, rtol=1e-4)
    assert (len(experts_of(plan).merged), unfuse(block)) == (4, None)


def test_experts_are_trained(one_thread: None) -> None:
    losses: list[list[float]] = [[], []]
    for fused, found in enumerate(losses):
        torch.manual_seed(0)
        block = models.Masked()
        randomise(block)
        if fused:
            fuse(block, (hidden(),))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
        for _ in range(10):
            loss = (block(hidden())[0] - hidden().roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_experts_cut_in_two_as_the_plan_says(one_thread: None) -> None:
    block = models.Masked()
    randomise(block)
    for expert in block.experts:
        # Added once, not by each device.
        nn.init.zeros_(expert.w2.bias)
    styles = experts_of(fuse(block, (hidden(),))).sharding
    assert styles.keys() == {f"experts.{i}.{name}" for i in range(models.EXPERTS) for name in ("w1", "w2", "w3")}
    unfuse(block)
    expected = block(hidden())[0]
    halves = [copy.deepcopy(block) for _ in range(2)]
    for rank, half in enumerate(halves):
        for name, style in styles.items():
            linear = half.get_submodule(name)
            linear.weight.data = linear.weight.chunk(2, dim=0 if style == "column" else 1)[rank]
            if style == "column":
                linear.bias.data = linear.bias.chunk(2)[rank]
        plan = fuse(half, (hidden(),))
        assert "experts" in names(plan), reasons(plan)
    torch.testing.assert_close(sum(half(hidden())[0] for half in halves), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_of_another_type(dtype: torch.dtype, one_thread: None) -> None:
    """The op gives numbers of the tokens' type; a loop that gives wider ones is left alone."""
    block = models.WideResults().to(dtype)
    plan = fuse(block, (hidden(dtype=torch.float32).to(dtype),))
    assert ("experts" in names(plan)) == (dtype == torch.float32), reasons(plan)


def test_experts_of_their_full_size_are_not_needed(one_thread: None) -> None:
    with torch.device("meta"):
        block = models.Masked()
        block.num_experts, size, inner = 64, 2048, 16384
        block.gate = nn.Linear(size, 64)
        block.experts = nn.ModuleList(models.Gated() for _ in range(64))
        for expert in block.experts:  # 26 GB
            expert.w1, expert.w3 = nn.Linear(size, inner), nn.Linear(size, inner)
            expert.w2 = nn.Linear(inner, size)
        x = torch.zeros(1, 7, size)
        recorded = record(block, lambda _: block(x))
    plan = analyse(recorded).plan
    assert "experts" in names(plan), reasons(plan)
