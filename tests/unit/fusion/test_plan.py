"""What plans say of a whole model, and that they survive being written down."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.zoo import build
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.plan import Fusion, FusionPlan, Kept, KindPlan


def _kind(name: str, paths: list[str], num_linears: int, num_fused: int, *kept: Kept) -> KindPlan:
    children = tuple(f"fc{i}" for i in range(num_fused))
    fusions = (Fusion("linear", children, ("linear",)),) if num_fused else ()
    return KindPlan(name, "model.py", 1, tuple(paths), "fused", fusions, kept, num_linears=num_linears)


def _layers(count: int) -> list[str]:
    return [f"model.layers.{i}.mlp" for i in range(count)]


def _plan(*kinds: KindPlan, layers: str = "model.layers") -> FusionPlan:
    return FusionPlan("Net", kinds, layers=layers)


@pytest.mark.parametrize(
    ("plan", "shortfall"),
    [
        (_plan(_kind("A", _layers(2), 10, 10)), None),
        (_plan(_kind("A", _layers(2), 10, 9)), None),
        (
            _plan(_kind("A", _layers(2), 10, 8, Kept("linear", "it is in a loop"))),
            "16 of 20 linears of the decoder layers run in fused ops (A: it is in a loop)",
        ),
        (_plan(_kind("A", _layers(1), 2, 1)), "1 of 2 linears of the decoder layers run in fused ops"),
        # Nine of ten counts over all layers, not for each kind.
        (_plan(_kind("A", _layers(9), 2, 2), _kind("B", ["model.layers.9.mlp"], 2, 0)), None),
        # Others than the decoder layers' do not count.
        (_plan(_kind("A", _layers(2), 2, 2), _kind("Head", [""], 9, 0)), None),
        (_plan(_kind("A", _layers(2), 0, 0)), "its decoder layers hold no plain linear layers"),
        (_plan(_kind("A", _layers(2), 2, 2), layers=""), "its decoder layers hold no plain linear layers"),
        (_plan(_kind("A", ["model.layers2.0"], 2, 2)), "its decoder layers hold no plain linear layers"),
        (
            _plan(_kind("A", _layers(2), 2, 2, Kept("residual_norm", "it is not added by +"))),
            "residual and norm of A stay apart: it is not added by +",
        ),
        (_plan(_kind("A", _layers(2), 2, 2, Kept("rotary", "it rotates in a way of its own"))), None),
        (_plan(_kind("A", _layers(2), 2, 2), _kind("N", ["norm"], 0, 0, Kept("residual_norm", "apart"))), None),
    ],
)
def test_what_counts_as_fused(plan: FusionPlan, shortfall: str | None) -> None:
    assert plan.shortfall == shortfall
    assert plan.counts_as_fused is (shortfall is None)


def test_decoder_layers_are_the_longest_list_that_ran() -> None:
    assert analyse_model(build("llama")).plan.layers == "model.layers"
    assert analyse_model(build("gpt2")).plan.layers == "transformer.h"


def test_plans_survive_json() -> None:
    plan = analyse_model(build("gemma2")).plan
    assert plan.num_fusions > 0 and plan.key
    assert FusionPlan.from_json(plan.to_json()) == plan
    assert FusionPlan.from_json(plan.to_json().decode()) == plan


def test_plans_of_the_same_model_have_the_same_text() -> None:
    texts = {analyse_model(build("llama", seed)).plan.to_json() for seed in (0, 1)}
    assert len(texts) == 1


def test_the_key_is_of_source_and_config() -> None:
    model = build("llama")
    key = analyse_model(model).plan.key
    assert analyse_model(build("mistral")).plan.key != key
    model.config.rms_norm_eps = 0.5
    assert analyse_model(model).plan.key != key


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_class": 5, "kinds": []}', '{"kinds": []}'])
def test_damaged_plans_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        FusionPlan.from_json(text)


def test_plans_of_another_format_are_refused() -> None:
    text = msgspec.json.encode(replace(_plan(), version=99))
    with pytest.raises(ValueError, match="version 99 of its format; this is version 1"):
        FusionPlan.from_json(text)
