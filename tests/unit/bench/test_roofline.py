from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from transfuse.bench.latency import Point, Sample
from transfuse.bench.roofline import Floor, Limits, measure_limits, model_floor
from transfuse.bench.stats import Distribution
from transfuse.bench.timing import Timing
from transfuse.inspect.attention import AttentionLayer
from transfuse.inspect.costs import Cost, ModelCosts
from transfuse.models.resolve import resolve_model

# 100 bytes and 10 operations of weights, of which 4 for logits; attention of 2 · 1 · (1 + 1) = 4 operations and 2 bytes
# for each position.
COSTS = ModelCosts({"head": Cost(40, 4), "": Cost(60, 6)}, {}, (AttentionLayer(0, 1, 1, 1, 1, None, 1),))
HEAD = COSTS.by_path["head"]


def floor(bytes_per_s: float, flops_per_s: float) -> Floor:
    return Floor(COSTS, HEAD, Limits(bytes_per_s, {"float32": flops_per_s}), "float32")


def test_decode_is_bound_by_memory_or_by_arithmetic() -> None:
    assert floor(10, 1e9).decode_seconds(1, 5) == (100 + 2 * 5) / 10
    # The weights are read once for all, the cache by each.
    assert floor(10, 1e9).decode_seconds(3, 5) == (100 + 3 * 2 * 5) / 10
    assert floor(1e9, 10).decode_seconds(3, 5) == 3 * (10 + 4 * 5) / 10


def test_bytes_that_coded_exponents_save_are_not_read() -> None:
    saving = replace(floor(10, 1e9), saved_bytes=25)
    assert saving.decode_seconds(3, 5) == (75 + 3 * 2 * 5) / 10
    assert saving.prefill_seconds(2, 3) == 75 / 10


def test_prefill_needs_logits_of_the_last_token_alone() -> None:
    attention = 4 * (1 + 2 + 3)
    assert floor(1e9, 10).prefill_seconds(2, 3) == 2 * (3 * 6 + 4 + attention) / 10
    assert floor(10, 1e9).prefill_seconds(2, 3) == 10


def test_shares_say_how_near_a_run_came() -> None:
    limits = floor(10, 1e9)
    # Two tokens after the first, with 4 and 5 positions: at the floor, and at half of its speed.
    steps = [limits.decode_seconds(1, context) for context in (4, 5)]
    at_floor = Timing(0.0, [10.0, 10.0 + steps[0], 10.0 + sum(steps)], 10.0 + sum(steps), num_output_tokens=3)
    slower = Timing(0.0, [20.0, 20.0 + 2 * steps[0], 20.0 + 2 * sum(steps)], 20.0 + 2 * sum(steps), num_output_tokens=3)
    shares = limits.shares(Point(3, 3, 1), [Sample([at_floor], 0.0), Sample([slower], 0.0)])
    for name in ("prefill_floor_share", "decode_floor_share"):
        share = shares[name]
        assert isinstance(share, Distribution)
        assert (share.low, share.high) == (pytest.approx(0.5), pytest.approx(1.0))


def test_the_better_of_two_measurements_counts() -> None:
    found = Limits(10, {"float32": 5, "bfloat16": 9}).better(Limits(8, {"float32": 7, "bfloat16": 3}))
    assert found == Limits(10, {"float32": 7, "bfloat16": 9})
    assert found.conditions() == {"memory read GB/s": 0.0, "float32 GFLOP/s": 0.0, "bfloat16 GFLOP/s": 0.0}


@pytest.mark.usefixtures("one_thread")
def test_this_machine_can_be_measured() -> None:
    found = measure_limits("float16", read_bytes=2**20, product=(8, 16, 16))
    assert set(found.flops_per_s) == {"float16", "bfloat16", "float32"}
    assert found.bytes_per_s > 0 and min(found.flops_per_s.values()) > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_floor_is_of_its_own_sizes(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path), cache_dir=tmp_path, weights=False)
    found = model_floor(source, "bfloat16", Limits(1.0, {"bfloat16": 1.0}), trust_remote_code=False)
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    head = 32 * 128
    assert found.head.flops == 2 * head
    assert found.costs.total.flops == 2 * (2 * layer + head)
    # Every matrix, five norms and one row of the embedding, two bytes each.
    assert found.costs.total.weight_bytes == 2 * (2 * layer + head + 5 * 32 + 32)
    assert found.costs.cache_bytes(10) == 2 * 2 * 2 * 8 * 2 * 10
    assert torch.get_default_dtype() == torch.float32
