"""Weights that are cut in two as the plan says give what whole ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.unit.fusion.conftest import randomise
from tests.unit.fusion.sharded import sharded
from tests.zoo import build
from transfuse.fusion.analysis import trace_model
from transfuse.fusion.apply import analyse
from transfuse.fusion.plan import KindPlan
from transfuse.trace.graph import TensorFacts, Trace, value_of
from transfuse.trace.values import Constant

# Linear layers in three, gated units whole and packed, packed projections side by side, by head and by group, latent
# attention, several norms of queries and keys, plain feed-forwards, and weights kept the other way round.
TYPES = (
    "llama",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "bert",
    "starcoder2",
    "olmo2",
    "cohere",
    "granitemoeshared",
)


def number_in(facts: Any, generator: torch.Generator) -> Any:
    """Random numbers in the shapes of what a forward was given."""
    if isinstance(facts, TensorFacts):
        if not facts.dtype.is_floating_point:
            return torch.zeros(facts.shape, dtype=facts.dtype)
        return torch.randn(facts.shape, generator=generator)
    if isinstance(facts, tuple):
        return tuple(number_in(part, generator) for part in facts)
    return {key: number_in(part, generator) for key, part in facts.items()} if isinstance(facts, dict) else facts


def arguments(trace: Trace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: number_in(value_of(node), generator) if isinstance(node, fx.Node) else getattr(node, "value", node)
        for name, node in trace.arguments.items()
        if isinstance(node, fx.Node) or not isinstance(node, Constant)
    }


def whole(trace: Trace, module: nn.Module, model: Any, kind: KindPlan, given: dict[str, Any]) -> list[torch.Tensor]:
    """The same recording with nothing cut."""
    uncut = [f.__class__(**{**vars(f), "sharding": dict.fromkeys(f.sharding, "replicated")}) for f in kind.fusions]
    plan = kind.__class__(**{**vars(kind), "fusions": tuple(uncut)})
    return sharded(module, trace, model, plan, given)


@pytest.mark.parametrize("name", TYPES)
def test_halves_make_the_whole(name: str, one_thread: None) -> None:
    model = build(name)
    randomise(model)
    recorded = trace_model(model)
    plan = analyse(recorded).plan
    styles: set[str] = set()
    for kind in plan.kinds:
        if not kind.num_linears or kind.module_class.endswith(("ForCausalLM", "LMHeadModel", "Router")):
            continue
        module, trace = model.get_submodule(kind.paths[0]), recorded.traces[kind.paths[0]]
        given = arguments(trace)
        with torch.no_grad():
            expected = whole(trace, module, recorded, kind, given)
            found = sharded(module, trace, recorded, kind, given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
        styles |= {style for fusion in kind.fusions for style in fusion.sharding.values()}
    assert {"column", "row"} <= styles


def test_each_linear_layer_has_a_style(one_thread: None) -> None:
    for name in TYPES:
        plan = analyse(trace_model(build(name))).plan
        for kind in plan.kinds:
            styles = [
                fusion.sharding.get(child) for fusion in kind.fusions for child in fusion.children if fusion.sharding
            ]
            assert set(styles) <= {"column", "row", "replicated"}
            assert (
                sum(len(f.sharding) for f in kind.fusions if f.fuser in ("qkv", "glu", "mlp", "linear", "packed_qkv"))
                == kind.num_linears
            )
