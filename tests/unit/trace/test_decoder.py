"""What a recording says about a whole model: the worked example of the documentation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from examples.decoder import Decoder
from transfuse.fusion.query import op
from transfuse.trace.graph import ModelTrace
from transfuse.trace.recorder import record


@pytest.fixture(scope="module")
def trace() -> ModelTrace:
    module = Decoder().to("meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == 2_918_400
    return record(module, lambda _: module(torch.empty(1, 7, 256, device="meta")))


@pytest.fixture(scope="module")
def ops(trace: ModelTrace) -> Counter[str]:
    found: Counter[str] = Counter()
    for node, times in trace.nodes():
        found[op(node)] += times
    return found


def test_it_is_whole(trace: ModelTrace) -> None:
    assert trace.error is None
    assert all(kind.is_complete and not kind.assumptions and not kind.variants for kind, _ in trace.kinds())


def test_kinds(trace: ModelTrace) -> None:
    kinds = {
        kind.module_class.__name__: len(paths)
        for kind, paths in trace.kinds()
        if kind.module_class.__module__ == Decoder.__module__
    }
    assert kinds == {"Decoder": 1, "Layer": 4, "RMSNorm": 8, "Attention": 4, "FeedForward": 4}
    assert sum(len(paths) for kind, paths in trace.kinds() if kind.module_class is torch.nn.Linear) == 28


def test_counts_by_kind_of_node(trace: ModelTrace) -> None:
    counts = trace.counts()
    # 4 layers, and in each 2 norms, attention and feed-forward with 7 linear layers.
    assert counts["call_module"] == 4 * (1 + 4 + 7)
    # The weights of 8 norms and of 28 linear layers.
    assert counts["get_attr"] == 8 + 28


def test_reductions_of_the_norms(ops: Counter[str]) -> None:
    assert ops["mean"] + ops["rsqrt"] == 16


def test_attention(ops: Counter[str]) -> None:
    assert ops["matmul"] == 8
    assert ops["softmax"] == 4


def test_activations(ops: Counter[str]) -> None:
    assert ops["silu"] == 4
