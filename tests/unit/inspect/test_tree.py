from __future__ import annotations

from pathlib import Path

from transformers import BloomConfig, Qwen3MoeConfig

from tests.unit.inspect.models import Fails, Shared, Stack, llama_config, report_of
from transfuse.fusion.plan import Fusion
from transfuse.inspect.plan_lines import fusion_line
from transfuse.inspect.python_class import load_class_subject
from transfuse.inspect.report import Report, inspect_subject
from transfuse.inspect.summary import summary


def report_on(cls: type, tmp_path: Path) -> Report:
    return inspect_subject(load_class_subject(f"{cls.__module__}:{cls.__qualname__}"), tmp_path)


def test_equal_layers_are_one_line(tmp_path: Path) -> None:
    tree = report_of(llama_config(), tmp_path).tree
    (layers,) = (node for node in tree.walk() if node.module_class == "LlamaDecoderLayer")
    assert (layers.label, layers.count, layers.status) == ("0-2", 3, "fused")
    assert layers.cost.flops == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)


def test_layers_of_other_sizes_stand_apart(tmp_path: Path) -> None:
    tree = report_on(Stack, tmp_path).tree
    layers = [(node.label, node.count) for node in tree.walk() if node.module_class == "Mlp"]
    assert layers == [("0, 2", 2), ("1", 1)]


def test_a_module_with_two_paths_is_shown_twice_and_costs_once(tmp_path: Path) -> None:
    report = report_on(Shared, tmp_path)
    assert [node.status for node in report.tree.walk() if node.module_class == "Mlp"] == ["fused", "fused"]
    # It runs twice, and its weights are read twice.
    assert report.tree.cost.flops == report.costs.total.flops == 2 * 2 * 2 * 16 * 48
    assert report.costs.total.num_parameters == 2 * 16 * 48 + 48


def test_modules_that_a_pattern_computes_say_so(tmp_path: Path) -> None:
    tree = report_of(llama_config(), tmp_path).tree
    by_name = {node.label: node for node in tree.walk()}
    assert by_name["q_proj"].consumed_by == "qkv"
    assert by_name["q_proj"].status == "consumed"
    assert by_name["q_proj"].sizes == "64 → 64"
    assert by_name["post_attention_layernorm"].consumed_by == "residual_norm"


def test_dense_and_sparse_layers_are_different(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        mlp_only_layers=[0],
    )
    tree = report_of(config, tmp_path).tree
    layers = [(n.label, n.count) for n in tree.walk() if n.module_class == "Qwen3MoeDecoderLayer"]
    assert layers == [("0", 1), ("1-3", 3)]


def test_a_broken_forward_is_told_once_where_it_broke(tmp_path: Path) -> None:
    report = report_on(Fails, tmp_path)
    assert report.plan.error is not None
    assert "no further" in report.plan.error
    told = [reason for node in report.tree.walk() for _, reason in node.reasons() if "no further" in reason]
    assert len(told) == 1
    assert "models.py:" in told[0]
    by_name = {node.label: node.status for node in report.tree.walk()}
    assert by_name["second"] == "not run"
    assert report.after is None


def test_what_goes_through_a_seam_names_no_op() -> None:
    assert fusion_line(Fusion("attention", (), ())) == "attention"
    assert fusion_line(Fusion("qkv", ("q", "k"), ("linear",))) == "qkv: q, k → linear"


def test_a_model_whose_requests_run_side_by_side_is_shown_as_transformers_runs_it(tmp_path: Path) -> None:
    report = report_of(BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128), tmp_path)
    assert {node.module_class for node in report.tree.walk() if node.status == "not run"} == {"ModuleList"}
    assert report.plan.num_fused_linears == report.plan.num_linears > 0
    assert report.after is not None
    facts = summary(report)
    assert "breaks off" not in facts
    assert "BloomModel.forward (modeling_bloom.py:" in facts["recorded"]
