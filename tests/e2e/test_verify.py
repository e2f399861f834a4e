"""`transfuse verify` passes models that are right, and names the module of a fault planted in the served one."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from tests.zoo import tiny_config
from transfuse.config import engine_config
from transfuse.engine import block_tables, ragged_step
from transfuse.engine.build import BuiltEngine, build_engine
from transfuse.layers.merged import MergedParameter
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.models.resolve import resolve_model
from transfuse.verify import served
from transfuse.verify.checks import Check
from transfuse.verify.report import Report
from transfuse.verify.run import Extent, verify

Plant = Callable[[pytest.MonkeyPatch, BuiltEngine], None]
Verify = Callable[..., Report]


@pytest.fixture
def run(zoo_folder: Callable[[str], Path], verdicts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """A function that verifies a tiny model, with a fault in the served one once it is loaded and checked."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The keeper climbed the stairs to look\ndef merge(left, right):\nDie Stadt lag noch im Nebel\n")

    def verified(name: str, plant: Plant | None = None, impl: str = "plain", dtype: str = "float32") -> Report:
        def build(*args: Any, **kwargs: Any) -> BuiltEngine:
            built = build_engine(*args, **kwargs)
            assert built.summary.implementation == impl, built.summary.reason
            if plant is not None:
                plant(monkeypatch, built)
            return built

        monkeypatch.setattr(served, "build_engine", build)
        config = engine_config(
            zoo_folder(name),
            model_impl=impl,
            dtype=dtype,
            cache_dir=verdicts,
            num_threads=1,
            kv_cache_memory_bytes=2**26,
        )
        source = resolve_model(zoo_folder(name), cache_dir=verdicts)
        return verify(config, source, Extent(prompts, quick=True), command="", note=lambda text: None)

    return verified


def module(built: BuiltEngine, path: str) -> Any:
    return built.core.engine.runner.model.get_submodule(path)


def failed(report: Report) -> list[Check]:
    return [check for check in report.checks if check.status == "fail"]


@pytest.mark.parametrize(("impl", "dtype"), [("plain", "float32"), ("fused", "float32"), ("fused", "bfloat16")])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "mixtral", "gpt_neox"])
def test_a_model_that_is_right_passes(run: Verify, name: str, impl: str, dtype: str) -> None:
    report = run(name, impl=impl, dtype=dtype)
    assert failed(report) == []
    assert report.first_divergence is None
    assert not [check for check in report.checks if check.status == "skipped"]
    assert report.num_places > 20


def test_requests_side_by_side_are_compared_in_what_they_say(run: Verify) -> None:
    report = run("bloom")
    assert report.passed
    assert {check.group for check in report.checks if check.status == "skipped"} == {"modules", "layers"}


def test_the_original_passes_with_what_it_can_do(run: Verify) -> None:
    report = run("llama", impl="original")
    assert failed(report) == []
    assert {check.group for check in report.checks if check.status == "skipped"} == {"ways"}


def wrong_eps(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    layer, norm = (module(built, f"model.layers.0{name}") for name in ("", ".input_layernorm"))
    norm.variance_epsilon *= 10
    for fused in (layer, norm):
        # A fused forward has the constant in it.
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(fused).forward)))
        if "1e-06" in source:
            names = dict(inspect.unwrap(type(fused).forward).__globals__)
            exec(source.replace("1e-06", "1e-05"), names)
            fused.forward = MethodType(names["forward"], fused)


def swapped_keys_and_values(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    store = PagedCache.store

    def swapped(self: PagedCache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        store(self, layer, *((value, key) if layer == 1 else (key, value)))

    monkeypatch.setattr(PagedCache, "store", swapped)


def dropped_scale(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    attend = PagedCache.attend

    def unscaled(self: PagedCache, layer: int, *args: Any, scale: float, **kwargs: Any) -> torch.Tensor:
        return attend(self, layer, *args, scale=1.0 if layer == 1 else scale, **kwargs)

    monkeypatch.setattr(PagedCache, "attend", unscaled)


def wrong_rotary(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    module(built, "model.rotary_emb").inv_freq *= 1.01


def mixed_requests(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    init = PagedCache.__init__

    def mixed(self: PagedCache, kv_cache: Any, context: Any, *rest: Any) -> None:
        tables = tuple(table.flip(0) for table in context.block_table)
        init(self, kv_cache, dataclasses.replace(context, block_table=tables), *rest)

    monkeypatch.setattr(PagedCache, "__init__", mixed)


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
    build = ragged_step.build_step_inputs

    def shifted(*args: Any) -> Any:
        inputs = build(*args)
        context = dataclasses.replace(inputs.context, positions=inputs.context.positions + 1)
        return dataclasses.replace(inputs, context=context)

    monkeypatch.setattr(ragged_step, "build_step_inputs", shifted)


@pytest.mark.parametrize("impl", ["plain", "fused"])
@pytest.mark.parametrize(
    ("plant", "path", "place"),
    [
        (wrong_eps, "model.layers.0", ""),
        (swapped_keys_and_values, "model.layers.1.self_attn", ""),
        (dropped_scale, "model.layers.1.self_attn", ""),
        (wrong_rotary, "model.rotary_emb", "result (0)"),
        (mixed_requests, "model.layers.0.self_attn", ""),
        (positions_off_by_one, "(root)", "before model (position_ids)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_module_of_a_fault_is_named(run: Verify, plant: Plant, path: str, place: str, impl: str) -> None:
    report = run("llama", plant, impl)
    assert not report.passed
    first = report.first_divergence
    assert first is not None
    # Fused, a norm may be computed by the layer that holds it.
    paths = {path, f"{path}.input_layernorm"} if plant is wrong_eps else {path}
    assert first.path in paths
    assert first.place.startswith(place)
    assert "modeling_llama.py:" in first.source
    assert (first.fusions != ()) == (impl == "fused" and first.path != "model.rotary_emb")


def test_a_mixed_request_is_right_alone_and_wrong_beside_others(run: Verify) -> None:
    names = {check.name for check in failed(run("llama", mixed_requests)) if check.group == "ways"}
    assert "packed between others: log-probabilities" in names
    assert "prefix-cached: tokens" not in names  # which runs them one by one


def test_a_fault_shows_in_bfloat16(run: Verify) -> None:
    report = run("llama", dropped_scale, dtype="bfloat16")
    assert report.first_divergence is not None
    assert report.first_divergence.path == "model.layers.1.self_attn"


def test_one_bad_row_shows_in_bfloat16(run: Verify) -> None:
    def plant(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
        def spoil(head: torch.nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
            handle.remove()
            logits = logits.clone()
            logits[..., -1, :] = logits[..., -1, :].roll(1, -1)
            return logits

        handle = module(built, "lm_head").register_forward_hook(spoil)

    report = run("llama", plant, dtype="bfloat16")
    assert "largest error beyond the original's" in {check.name for check in failed(report)}
    assert report.first_divergence is None


def test_a_merged_weight_in_the_wrong_order_is_named(run: Verify) -> None:
    def plant(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
        attention = module(built, "model.layers.1.self_attn")
        name = next(key for key, value in vars(type(attention)).items() if isinstance(value, MergedParameter))
        joined = getattr(attention, name)
        joined.copy_(joined.roll(1, 0))

    first = run("llama", plant, "fused").first_divergence
    assert first is not None
    assert first.path == "model.layers.1.self_attn"
    assert "qkv" in first.fusions


def test_a_stale_prefix_is_named(run: Verify) -> None:
    def plant(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
        monkeypatch.setattr(
            block_tables, "block_digest", lambda parent, ids: hashlib.sha256(parent + bytes(len(ids))).digest()
        )

    report = run("llama", plant)
    assert "prefix-cached: log-probabilities" in {check.name for check in failed(report)}
    # No module is at fault.
    assert report.first_divergence is None


def test_a_wrong_router_is_named(run: Verify) -> None:
    def plant(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
        weight = module(built, "model.layers.1.mlp.gate").weight
        weight.copy_(weight.roll(1, 0))

    first = run("qwen3_moe", plant).first_divergence
    assert first is not None
    assert (first.path, first.kind) == ("model.layers.1.mlp.gate", "router")


def test_a_dropped_window_is_named(run: Verify) -> None:
    def plant(monkeypatch: pytest.MonkeyPatch, built: BuiltEngine) -> None:
        attend = PagedCache.attend

        def unwindowed(self: PagedCache, layer: int, query: torch.Tensor, mask: RaggedMask, **kw: Any) -> torch.Tensor:
            return attend(self, layer, query, RaggedMask(), **kw)

        monkeypatch.setattr(PagedCache, "attend", unwindowed)

    first = run("gemma2", plant).first_divergence
    assert first is not None
    windowed = tiny_config("gemma2").layer_types.index("sliding_attention")
    assert (first.path, first.kind) == (f"model.layers.{windowed}.self_attn", "attention")
