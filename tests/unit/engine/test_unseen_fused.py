"""The check of fused code: that fusions which are wrong are found, named and left out, and what runs then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.engine.driven import logits_of, random_prompts
from tests.zoo import MODEL_TYPES, build, load_facts
from tests.zoo.programs import Program, watched
from transfuse.config import ModelConfig
from transfuse.engine import unseen
from transfuse.engine.choice import choose
from transfuse.engine.unseen import check_fused
from transfuse.engine.verdicts import Verdict
from transfuse.fusion import analysis, gate
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.linears import JoinedLinears
from transfuse.fusion.norm import Norm, NormFuser
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.layers.merged import MergedParameter

pytestmark = pytest.mark.usefixtures("one_thread")

Plant = Callable[[pytest.MonkeyPatch], None]


def _norm(applies: Callable[[str | None], bool], **wrong: Callable[[Any], Any]) -> Plant:
    """A fault in what norms are rewritten to: settings changed."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Norm.call

        def faulty(self: Norm, x: str, owner: str = "self", residual: str | None = None) -> str:
            if applies(residual):
                self = replace(self, **{name: change(getattr(self, name)) for name, change in wrong.items()})
            return original(self, x, owner, residual)

        monkeypatch.setattr(Norm, "call", faulty)

    return plant


def _joined(order: Callable[[Sequence[str]], Sequence[str]], count: int) -> Plant:
    """A fault in joined weights: so many parts are joined in another order than the results are taken apart."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = JoinedLinears.attributes.fget
        assert original is not None

        def faulty(self: JoinedLinears) -> dict[str, MergedParameter]:
            found = original(self)
            if len(self.children) == count:
                found = {n: MergedParameter(order(p.children), p.parameter) for n, p in found.items()}
            return found

        monkeypatch.setattr(JoinedLinears, "attributes", property(faulty))

    return plant


def _another_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gate.activation_of

    def faulty(*arguments: Any) -> Any:
        found = original(*arguments)
        return found and ("gelu", *found[1:])

    monkeypatch.setattr(gate, "activation_of", faulty)


def _no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinedLinears, "arguments", property(lambda self: f"self.{self.name}_weight, None"))


FAULTS = [
    pytest.param(
        "llama", _norm(lambda residual: residual is None, eps=lambda e: e * 2), {"LlamaRMSNorm"}, id="eps of norms"
    ),
    pytest.param(
        "llama",
        _norm(lambda residual: residual is not None, eps=lambda e: e * 2),
        {"LlamaDecoderLayer"},
        id="eps of a residual's norm",
    ),
    pytest.param(
        "llama", _norm(lambda _: True, eps=lambda _: 1e-6), {"LlamaRMSNorm", "LlamaDecoderLayer"}, id="fixed eps"
    ),
    pytest.param("gemma2", _norm(lambda _: True, offset=lambda _: 0.0), {"Gemma2RMSNorm"}, id="1 + weight"),
    pytest.param("gpt2", _norm(lambda _: True, bias=lambda _: None), {"LayerNorm", "GPT2Block"}, id="bias of a norm"),
    pytest.param(
        "llama", _norm(lambda _: True, weight=lambda _: None), {"LlamaRMSNorm", "LlamaDecoderLayer"}, id="scale"
    ),
    pytest.param("llama", _joined(lambda c: (c[0], c[2], c[1]), 3), {"LlamaAttention"}, id="key and value swapped"),
    pytest.param("llama", _joined(lambda c: c[::-1], 2), {"LlamaMLP"}, id="gate and up swapped"),
    pytest.param("qwen2", _no_bias, {"Qwen2Attention"}, id="bias of query, key and value"),
    pytest.param("llama", _another_activation, {"LlamaMLP"}, id="another activation"),
]


@pytest.mark.parametrize(("name", "plant", "classes"), FAULTS)
def test_wrong_fusions_are_found_named_and_left_out(
    name: str, plant: Plant, classes: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build(name)
    requests = {"a": (random_prompts(9)[0], [1, 2, 3])}
    plain = choose(model, None, ModelConfig(cache_dir=tmp_path, model_impl="plain")).runner
    expected = logits_of(plain, requests)["a"]
    plain.close()
    plant(monkeypatch)
    verdict = check_fused(model, tmp_path)
    assert verdict.passed
    assert verdict.refused.keys() >= classes
    assert all("logits of a shrunk instance differ when run" in reason for reason in verdict.refused.values())
    found = choose(model, None, ModelConfig(cache_dir=tmp_path))
    assert found.runner.implementation == "fused"
    assert found.plan is not None
    kinds = {kind.module_class: kind for kind in found.plan.kinds if kind.module_class in verdict.refused}
    assert {kind.status for kind in kinds.values()} == {"refused"}
    assert found.plan.num_fusions > 0
    torch.testing.assert_close(logits_of(found.runner, requests)["a"], expected)
    found.runner.close()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen2"])
def test_without_the_fault_nothing_is_left_out(name: str, tmp_path: Path) -> None:
    verdict = check_fused(build(name), tmp_path)
    assert (verdict.passed, verdict.refused) == (True, {}), verdict.reason


def test_where_all_that_can_be_fused_is_wrong_plain_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama")
    monkeypatch.setattr(analysis, "analyse", functools.partial(analysis.analyse, fusers=(NormFuser(),)))
    _norm(lambda _: True, eps=lambda e: e * 10)(monkeypatch)
    found = choose(model, None, ModelConfig(cache_dir=tmp_path))
    found.runner.close()
    assert found.runner.implementation == "plain"
    assert found.reason == (
        "checked against the original on a shrunk instance: alone, packed and in chunks; not fused, since logits of a "
        "shrunk instance differ when run alone with any of LlamaRMSNorm fused"
    )


def test_fused_code_that_raises_is_left_out_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(JoinedLinears, "arguments", property(lambda self: "self.no_such_weight, None"))
    verdict = check_fused(build("llama"), tmp_path)
    assert verdict.passed
    assert verdict.refused.keys() == {"LlamaAttention", "LlamaMLP"}
    assert "AttributeError: 'LlamaMLP' object has no attribute 'no_such_weight'" in verdict.refused["LlamaMLP"]


def test_what_mixes_a_rows_tokens_is_not_blamed_on_fusions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama")
    forward = type(model.model.layers[0].mlp).forward
    monkeypatch.setattr(
        type(model.model.layers[0].mlp), "forward", lambda self, x: forward(self, x + x.roll(1, dims=1) * 0.1)
    )
    verdict = check_fused(model, tmp_path)
    assert not verdict.passed
    assert verdict.refused == {}
    assert verdict.reason == unseen._check(model).reason


@pytest.fixture
def unshrinkable(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_shrunk(*_: object) -> None:
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(unseen, "build_shrunk", build_shrunk)


@pytest.mark.usefixtures("unshrinkable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_shrunk_is_fused_itself_for_the_check(dtype: torch.dtype, tmp_path: Path) -> None:
    model: PreTrainedModel = build("llama").to(dtype)
    classes = [type(module) for module in model.modules()]
    verdict = check_fused(model, tmp_path)
    assert (verdict.passed, verdict.checked_on, verdict.refused) == (True, "loaded", {})
    assert [type(module) for module in model.modules()] == classes


HERE = Path(__file__).parent
FUSED_TYPES = dict(line.split() for line in (HERE / "fused_types.txt").read_text().splitlines())
PROGRAM_TYPES = {
    name: Program.parse(text)
    for name, _, text in (line.partition(" ") for line in (HERE / "program_types.txt").read_text().splitlines())
}


def test_every_type_is_fused_as_recorded() -> None:
    """Two ratchets. `fused_types.txt` holds the types that run `fused`, in `whole` or in `part`; none may fall back.

    `program_types.txt` holds what their programs are made of: how many ops, which kernels run in the steps of the
    check, and which operations are left to torch; or why there is none.
    """
    facts = load_facts()
    plain = (HERE / "plain_types.txt").read_text().split()
    found: dict[str, str] = {}
    reasons: dict[str, str | None] = {}
    programs: dict[str, Program] = {}
    for name in plain:
        assert facts[name].works
        with watched() as seen:
            found[name], reasons[name] = _extent(name)
            if found[name] != "none":
                programs[name] = seen.program()
    fell = {n: reasons[n] for n, extent in FUSED_TYPES.items() if found.get(n) not in (extent, "whole")}
    assert not fell, "these were fused further before"
    new = {n: extent for n, extent in found.items() if extent != "none" and FUSED_TYPES.get(n) != extent}
    assert not new, "these are fused further now: write them so into fused_types.txt"
    assert set(MODEL_TYPES) >= FUSED_TYPES.keys()
    if load_kernels().library is not None:
        _compare_programs(programs)


def _compare_programs(programs: dict[str, Program]) -> None:
    lost = [f"{n} {p}" for n, p in programs.items() if n in PROGRAM_TYPES and p.has_lost(PROGRAM_TYPES[n])]
    assert not lost, "kernels computed more of these before"
    changed = [f"{n} {program}" for n, program in programs.items() if PROGRAM_TYPES.get(n) != program]
    assert not changed, "kernels compute more of these now: write them so into program_types.txt"
    assert programs.keys() == PROGRAM_TYPES.keys()


def _extent(name: str) -> tuple[str, str | None]:
    model = build(name)
    verdict: Verdict = unseen._check(model, unseen._compare_fused)
    if not verdict.passed:
        return "none", verdict.reason
    plan = analyse_model(model).without(verdict.refused).plan
    return ("whole" if plan.counts_as_fused else "part"), plan.shortfall
