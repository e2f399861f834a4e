"""Attention over latents: found by what it computes, in any spelling, and right in any company."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.engine.driven import Driven, logits_of, random_prompts
from tests.unit.fusion import latent_models as models
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.plan import Fusion, FusionPlan

pytestmark = pytest.mark.usefixtures("one_thread")


def latent(plan: FusionPlan) -> list[Fusion]:
    """What was found, over all modules."""
    return [f for kind in plan.kinds for f in kind.fusions if f.fuser == "mla" for _ in kind.paths]


def reasons(plan: FusionPlan) -> set[str]:
    return {kept.reason.partition(" (")[0] for kind in plan.kinds for kept in kind.kept if kept.fuser == "mla"}


def requests() -> dict[str, tuple[list[int], list[int]]]:
    prompts, forced = random_prompts(21, 1, 6, 40, 13), random_prompts(6, 6, 6, 6, 6, seed=1)
    return {str(i): pair for i, pair in enumerate(zip(prompts, forced, strict=True))}


def of_plain(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], int]:
    """Logits where keys and values are expanded, and the bytes of a block."""
    runner = PlainRunner(model)
    found = logits_of(runner, requests()), runner.bytes_per_block(4)
    runner.close()
    return found


def assert_alike(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for key, logits in expected.items():
        assert (found[key] - logits).abs().max() < 3e-5 * logits.std(), key


def assert_right_in_any_company(model: PreTrainedModel) -> tuple[FusionPlan, float]:
    """The plan, and what a block takes of what it takes expanded."""
    expected, expanded_bytes = of_plain(model)
    analysis = analyse_model(model)
    runner = FusedRunner(model, analysis)
    try:
        for settings in ({"max_num_seqs": 1}, {"budget": 256}, {"budget": 7}):
            assert_alike(logits_of(runner, requests(), **settings), expected)
        return analysis.plan, runner.bytes_per_block(4) / expanded_bytes
    finally:
        runner.close()


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2:no_q_lora", "longcat_flash"])
def test_types_of_the_zoo_keep_latents(name: str) -> None:
    model = build(name)
    plan, share = assert_right_in_any_company(model)
    config = model.config
    found = latent(plan)
    assert len(found) == sum(type(module).__name__ == type(_attention(model)).__name__ for module in model.modules())
    assert reasons(plan) == set()
    assert {(f.children, f.kernels) for f in found} == {(("kv_b_proj",), ("latent_attention",))}
    assert all(f.sharding == {"kv_b_proj": "column"} for f in found)
    assert plan.num_fused_linears == plan.num_linears
    heads, kept = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
    assert share == kept / (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    (source,) = {kind.source for kind in plan.kinds if any(f.fuser == "mla" for f in kind.fusions)}
    assert source is not None
    assert "latent_weight=self.kv_b_proj.weight" in source
    assert "expand_kv" not in source


def _attention(model: PreTrainedModel) -> torch.nn.Module:
    attention = model.model.layers[0].self_attn
    return attention[0] if isinstance(attention, torch.nn.ModuleList) else attention


@pytest.mark.parametrize("attention", [models.Inline, models.Expanded])
def test_others_keep_latents_by_what_they_compute(attention: type[models.Latent]) -> None:
    plan, share = assert_right_in_any_company(models.model_of(attention))
    assert reasons(plan) == set()
    assert [(f.children, f.details) for f in latent(plan)] == [
        (("up",), {"num_heads": 4, "rank": 32, "own_dim": 16, "shared_dim": 8, "value_head_dim": 12})
    ] * 2
    assert share == (32 + 8) / (4 * (24 + 12))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (models.Scaled, "keys and values are made of latents in a way of their own"),
        (models.Normed, "keys and values are made of latents in a way of their own"),
        (models.Residual, "keys and values are made of latents in a way of their own"),
        (models.Looking, "what keys and values are made by is needed besides"),
        (models.Branching, "keys or values may be needed besides, or be something else"),
        (models.Biased, "up has a bias or a weight that is kept transposed"),
    ],
)
def test_what_is_not_just_so_keeps_keys_and_values(attention: type[models.Latent], reason: str) -> None:
    model = models.model_of(attention)
    plan = analyse_model(model).plan
    assert (latent(plan), reasons(plan)) == ([], {reason})
    plan, share = assert_right_in_any_company(model)
    assert share == 1


def test_it_is_no_business_of_other_attention() -> None:
    for name in ("llama", "gpt_neox", "phi3", "falcon_h1"):
        plan = analyse_model(build(name)).plan
        assert (latent(plan), reasons(plan)) == ([], set())


def test_latents_beside_keys_and_values_survive_preemption() -> None:
    model = models.model_of(models.Inline, models.Biased)
    expected, _ = of_plain(model)
    runner = FusedRunner(model, analyse_model(model))
    assert [(group.kind, group.layers) for group in runner.groups] == [("latent", (0,)), ("full", (1,))]
    driven = Driven(runner, num_blocks=1 + 2 * 14)
    for key, (prompt, forced) in requests().items():
        driven.add(key, prompt, forced)
    found = driven.finish(driven.scheduler.check)
    runner.close()
    assert sum(request.num_preemptions for request in driven.requests) > 0
    assert_alike(found, expected)
