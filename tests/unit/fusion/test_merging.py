"""Which weights are joined, and which cannot be."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.engine.driven import logits_of, random_prompts
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.merging import merged_groups, unmergeable
from transfuse.models.placement import place_weights


def test_groups_are_those_that_fused_forwards_read_as_one() -> None:
    model = build("llama")
    groups = merged_groups(model, analyse_model(model))
    layer = model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    found = [{id(parameter) for parameter in group} for group in groups]
    assert {id(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)} in found
    assert {id(p.weight) for p in (mlp.gate_proj, mlp.up_proj)} in found
    assert len(groups) == 2 * model.config.num_hidden_layers


def test_placed_weights_are_joined_without_a_copy() -> None:
    model = build("qwen2")
    analysis = analyse_model(model)
    place_weights(model, merged_groups(model, analysis))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for kind in analysis.kinds:
        for path in kind.plan.paths if kind.fused_class is not None and kind.merged else ():
            module = model.get_submodule(path)
            module.__class__ = kind.fused_class
            for name, value in vars(kind.fused_class).items():
                if name.endswith(("_weight", "_bias")):
                    first = f"{path}.{value.children[0]}.{value.parameter}"
                    assert getattr(module, name).data_ptr() == addresses[first]
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


def test_a_weight_that_is_tied_to_one_elsewhere_is_not_joined() -> None:
    model = build("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.v_proj.weight
    analysis = analyse_model(model)
    attention = {k.plan.paths: k.plan for k in analysis.kinds if k.plan.module_class == "LlamaAttention"}
    first_path, second_path = ("model.layers.0.self_attn",), ("model.layers.1.self_attn",)
    assert attention.keys() == {first_path, second_path}
    assert attention[first_path].fusions, "the first has its own place"
    assert (attention[second_path].status, attention[second_path].fusions) == ("refused", ())
    assert {kept.reason for kept in attention[second_path].kept} == {"a weight to be joined is tied to another"}
    assert not unmergeable(model, analysis), "what is left can be joined"
    requests = {"a": (random_prompts(9)[0], [1, 2])}
    plain = logits_of(PlainRunner(model), requests)
    torch.testing.assert_close(logits_of(FusedRunner(model, analysis), requests), plain)


def test_layers_that_are_tied_as_wholes_share_one_group() -> None:
    model = build("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight, second.up_proj.weight = first.gate_proj.weight, first.up_proj.weight
    analysis = analyse_model(model)
    assert not unmergeable(model, analysis)
    groups = merged_groups(model, analysis)
    assert len(groups) == 2 * model.config.num_hidden_layers - 1


def test_weights_of_different_dtypes_are_not_joined() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    assert not unmergeable(model, analysis)
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.to(torch.float64), requires_grad=False)
    assert unmergeable(model, analysis) == {"model.layers.1.mlp": "weights to be joined have different dtypes"}
