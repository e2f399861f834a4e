"""The fused forward on ragged batches: what runs, what it gives, and that plans are held to what they say."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.unit.engine.driven import Driven, logits_of, random_prompts
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.kinds import Analysis
from transfuse.fusion.plan import Fusion
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.kernels.torch_ops import executions
from transfuse.progress import ProgressCounter

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama", "gemma2", "gpt_oss", "gpt2"]


def _requests() -> dict[str, tuple[list[int], list[int]]]:
    prompts, forced = random_prompts(21, 1, 6, 40, 13), random_prompts(6, 6, 6, 6, 6, seed=1)
    return {str(i): pair for i, pair in enumerate(zip(prompts, forced, strict=True))}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_plain_in_any_company(name: str) -> None:
    model, requests = build(name), _requests()
    plain = PlainRunner(model)
    expected = logits_of(plain, requests)
    plain.close()
    runner = FusedRunner(model, analyse_model(model))
    for settings in ({"max_num_seqs": 1}, {"budget": 256}, {"budget": 7}):
        found = logits_of(runner, requests, **settings)
        for key, logits in expected.items():
            assert (found[key] - logits).abs().max() < 1e-5 * logits.std(), (settings, key)
    runner.close()


def test_every_step_runs_the_ops_of_the_plan() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    runner = FusedRunner(model, analysis)
    num_layers = model.config.num_hidden_layers
    driven = Driven(runner)
    driven.add("a", random_prompts(9)[0], [1, 2, 3])
    with runner.by_modules():
        before = executions.copy()
        driven.finish()
        ran = executions - before
    runner.close()
    # Three steps: joined query, key and value, output and down projection of each layer, and the head.
    assert ran["linear"] == 3 * (3 * num_layers + 1)
    assert ran["linear_glu"] == ran["add_rms_norm"] == ran["rotary"] == 3 * num_layers
    assert ran["rms_norm"] == 3 * (num_layers + 1)


def test_close_gives_the_model_back() -> None:
    model = build("gemma3")
    classes = [type(module) for module in model.modules()]
    ids = torch.tensor(random_prompts(7))
    before = model(input_ids=ids).logits
    implementations = (model.config._attn_implementation, model.config._experts_implementation)
    runner = FusedRunner(model, analyse_model(model))
    assert type(model) is not classes[0]
    logits_of(runner, {"a": (random_prompts(9)[0], [1])})
    runner.close()
    assert [type(module) for module in model.modules()] == classes
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["cpmant", "blt", "prophetnet"])
def test_a_refusal_gives_the_model_back(name: str) -> None:
    model = build(name)
    classes = [type(module) for module in model.modules()]
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError):
        FusedRunner(model, analyse_model(model))
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == implementation


def test_the_program_runs_the_compiled_kernels() -> None:
    model = build("llama")
    runner = FusedRunner(model, analyse_model(model))
    num_layers = model.config.num_hidden_layers
    library = load_kernels().library
    assert library is not None
    driven = Driven(runner)
    driven.add("a", random_prompts(9)[0], [1, 2, 3])
    names = ("linear", "rotary_cache", "paged_attention", "gather_rows", "norm")
    before, twins = [library.executions(name) for name in names], executions.copy()
    driven.finish()
    ran = [library.executions(name) - count for name, count in zip(names, before, strict=True)]
    runner.close()
    # Three steps. Norms are part of the products, but for the last, which only some rows of go on.
    assert ran == [3 * (4 * num_layers + 1), 3 * num_layers, 3 * num_layers, 3 * 2, 3]
    assert executions == twins


def test_layers_are_counted_as_they_begin() -> None:
    """What tells a slow step from a frozen one works module by module, and in a program, which counts its ops."""
    model = build("llama")
    runner = FusedRunner(model, analyse_model(model))
    num_layers = model.config.num_hidden_layers
    counters = [ProgressCounter.create(), ProgressCounter.create()]
    for by_modules, counter in zip((True, False), counters, strict=True):
        driven = Driven(runner)
        driven.add("a", random_prompts(9)[0], [1, 2])
        runner.show_progress(counter)
        with runner.by_modules() if by_modules else nullcontext():
            before = counter.value
            driven.finish()
            counts = counter.value - before
        assert counts == 2 * num_layers if by_modules else counts >= 2 * 4 * num_layers
    runner.close()
    for counter in counters:
        counter.close()


def test_bfloat16_runs_within_its_rounding() -> None:
    requests = _requests()
    expected = logits_of(PlainRunner(build("llama")), requests)
    model = build("llama").bfloat16()
    runner = FusedRunner(model, analyse_model(model))
    for key, logits in logits_of(runner, requests).items():
        assert logits.dtype == torch.float32  # not rounded once more
        assert (logits.float() - expected[key]).abs().mean() < 0.05 * expected[key].std()
    runner.close()


def _changed(analysis: Analysis, module_class: str, **changes: Any) -> Analysis:
    """The analysis with another plan for a class."""
    kinds = [
        replace(kind, plan=replace(kind.plan, **changes)) if kind.plan.module_class == module_class else kind
        for kind in analysis.kinds
    ]
    return Analysis(replace(analysis.plan, kinds=tuple(kind.plan for kind in kinds)), kinds)


def test_a_plan_that_claims_too_much_is_refused() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    (mlp,) = [kind.plan for kind in analysis.kinds if kind.plan.module_class == "LlamaMLP"]
    claims = (*mlp.fusions, Fusion("norm", (), ("layer_norm",)))
    with pytest.raises(UnsupportedModelError, match="should run layer_norm 2 times, and ran it 0 times"):
        FusedRunner(model, _changed(analysis, "LlamaMLP", fusions=claims))


def test_a_plan_that_claims_too_little_is_refused() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    (mlp,) = [kind.plan for kind in analysis.kinds if kind.plan.module_class == "LlamaMLP"]
    with pytest.raises(UnsupportedModelError, match="should run linear 5 times, and ran it 7 times"):
        FusedRunner(model, _changed(analysis, "LlamaMLP", fusions=mlp.fusions[:1]))


def test_a_fused_forward_that_never_runs_is_no_claim() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    model.model.idle = build("llama").model.layers[0].mlp
    with pytest.raises(UnsupportedModelError, match="LlamaMLP has a fused forward, and it did not run"):
        idle = _changed(analysis, "LlamaMLP", paths=("model.idle",))
        FusedRunner(model, idle)


def test_where_nothing_can_be_fused_it_says_why() -> None:
    model = build("llama")
    analysis = analyse_model(model)
    every = {kind.plan.module_class: "left alone on purpose" for kind in analysis.kinds}
    with pytest.raises(UnsupportedModelError, match=r"nothing of it can be fused \(\w+: left alone on purpose\)"):
        FusedRunner(model, analysis.without(every))
    with pytest.raises(UnsupportedModelError, match="nothing of it can be fused: no pattern was found in it"):
        FusedRunner(model, Analysis(replace(analysis.plan, kinds=())))
    with pytest.raises(UnsupportedModelError, match=r"nothing of it can be fused \(it broke\)"):
        FusedRunner(model, Analysis(replace(analysis.plan, kinds=(), error="it broke")))


def test_errors_of_the_fused_forward_are_refusals_and_give_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    analysis = analyse_model(model)
    (mlp,) = [kind for kind in analysis.kinds if kind.plan.module_class == "LlamaMLP"]

    def broken(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise NameError("name 'torch' is not defined")

    assert mlp.fused_class is not None
    monkeypatch.setattr(mlp.fused_class, "forward", broken)
    with pytest.raises(UnsupportedModelError, match=r"its fused forward fails: NameError: name 'torch' is not .*\.py:"):
        FusedRunner(model, analysis)
    assert type(model) is LlamaForCausalLM


def test_an_analysis_that_fails_leaves_the_model_unfused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: PreTrainedModel = build("llama")
    model.model.lock = open(__file__)  # noqa: SIM115  (of a kind that cannot be copied)
    with model.model.lock:
        analysis = analyse_model(model)
    assert analysis.plan.error is not None and analysis.plan.error.startswith("the analysis failed: TypeError: ")
    assert "LlamaForCausalLM cannot be analysed" in caplog.text
