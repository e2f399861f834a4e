from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import torch

from tests.unit.inspect.models import Stack
from transfuse.inspect.counts import count_nodes
from transfuse.inspect.python_class import load_class_subject
from transfuse.inspect.report import inspect_subject

DECODER = Path(__file__).parents[3] / "examples" / "decoder.py"


def test_the_decoder_holds_what_is_written_in_it() -> None:
    module = runpy.run_path(str(DECODER))["Decoder"]()
    subject = load_class_subject(f"{DECODER}:Decoder")
    counts = count_nodes(subject.record().trace)
    leaves = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    assert counts.by_kind["call_module"] == len(leaves) == 28
    assert counts.by_kind["get_attr"] == 8
    assert counts.by_operation["mean"] + counts.by_operation["rsqrt"] == 16
    assert counts.by_operation["matmul"] == 8
    assert counts.by_operation["softmax"] == 4
    assert counts.by_operation["silu"] == 4


def test_the_docs_tell_the_same(tmp_path: Path) -> None:
    """Where a change moves these counts, docs/inspect.md is to be brought up to date."""
    report = inspect_subject(load_class_subject(f"{DECODER}:Decoder"), tmp_path)
    assert report.after is not None
    text = (DECODER.parents[1] / "docs" / "inspect.md").read_text()
    for kind, name in (("call_function", "functions"), ("call_method", "methods"), ("get_attr", "attributes")):
        assert f"| {name} | {report.before.by_kind[kind]} | {report.after.by_kind[kind]} |" in text
    assert f"graph has {report.before.total} nodes. Fused it has {report.after.total}" in text


def test_a_stack_counts_as_the_symbolic_tracer_counts_it() -> None:
    traced = torch.fx.symbolic_trace(Stack())
    subject = load_class_subject(f"{Stack.__module__}:Stack")
    counts = count_nodes(subject.record().trace)
    expected = Counter(node.op for node in traced.graph.nodes)
    for kind in ("call_module", "get_attr", "placeholder", "output"):
        assert counts.by_kind[kind] == expected[kind], kind
    # An operator reaches torch as the method that stands for it; the symbolic tracer calls it a function.
    calls = ("call_function", "call_method")
    assert sum(counts.by_kind[kind] for kind in calls) == sum(expected[kind] for kind in calls)


def test_fused_there_are_fewer_products_and_no_modules_left(tmp_path: Path) -> None:
    report = inspect_subject(load_class_subject(f"{DECODER}:Decoder"), tmp_path)
    assert report.after is not None
    assert report.after.by_kind["call_module"] == 0
    after = report.after.by_operation
    assert after["transfuse.linear"] == 12
    assert after["transfuse.linear_glu"] == 4
    assert after["transfuse.rms_norm"] + after["transfuse.add_rms_norm"] == 8
    assert after["rsqrt"] == 0
    # Joining weights is no part of a forward.
    assert after["copy_"] == 0
    assert report.after.total < report.before.total
