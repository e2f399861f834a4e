from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from transfuse.bench.ops import OpTimes, op_cost
from transfuse.bench.roofline import Limits
from transfuse.program.graph import View
from transfuse.program.native import NativeOp, PackedWeight
from transfuse.program.sizes import ONE, ZERO, Size, StepSize

T, R = Size((0, 1, 0, 0, 0)), Size((0, 0, 0, 1, 0))
WEIGHT_BYTES = 2 * 16 * 8 * 3 // 4
STEP = StepSize(num_tokens=3, num_logit_rows=1, num_requests=2, num_blocks=4)
INPUTS = {"seq_lens": torch.tensor([10, 7]), "cu_seqlens_q": torch.tensor([0, 1, 3])}


def view(*sizes: int | Size, dtype: torch.dtype = torch.bfloat16, buffer: int = 0) -> View:
    named = tuple(Size.of(size) if isinstance(size, int) else size for size in sizes)
    return View(buffer, dtype, ZERO, named, (ONE,) * len(named))


WEIGHT = PackedWeight(view(16, 8))
SIZES = {WEIGHT: WEIGHT_BYTES}


def linear() -> NativeOp:
    tensors = [view(T, 8), None, None, None, view(T, 16, dtype=torch.float32), *[None] * 5]
    return NativeOp("linear", tensors, (4,), [16, 8], weight=WEIGHT, weight_index=1)


def attention(window: int = 0) -> NativeOp:
    cache = view(50, 2, 4, 8), view(50, 2, 4, 6)
    lists = view(R, 4, dtype=torch.int32), view(R, dtype=torch.int32), view(R, dtype=torch.int32)
    tensors = [view(T, 6, 8), *cache, *lists, None, view(T, 6, 6), None]
    return NativeOp("paged_attention", tensors, (7,), [window], [1.0, 0.0])


def test_a_product_reads_its_weight_once_as_it_is_packed_and_its_rows_each() -> None:
    cost = op_cost(linear(), STEP, INPUTS, SIZES)
    assert cost.num_bytes == WEIGHT_BYTES + 3 * (2 * 8 + 4 * 16)
    assert cost.flops == 2 * 3 * 16 * 8


@pytest.mark.parametrize(("window", "read", "pairs"), [(0, 17, 10 + 6 + 7), (4, 5 + 6, 4 + 4 + 4)])
def test_attention_reads_the_context_that_it_sees(window: int, read: int, pairs: int) -> None:
    cost = op_cost(attention(window), STEP, INPUTS, {})
    assert cost.num_bytes == read * 2 * (8 + 6) * 2
    assert cost.flops == 2 * pairs * 6 * (8 + 6)


def test_rows_are_of_the_commonest_step_and_say_how_near_to_the_limit_they_came() -> None:
    times, ops = OpTimes(), [linear(), linear(), attention()]
    for step in (STEP, STEP, replace(STEP, num_tokens=50)):
        times.observe(SIZES, ops, np.array([1000, 3000, 5000, 9000]), step, INPUTS)
    cost = op_cost(linear(), STEP, INPUTS, SIZES)
    limits = Limits(bytes_per_s=cost.num_bytes / 1e-6, flops_per_s={"bfloat16": 1e30})
    first, second = times.rows(limits, "bfloat16")
    assert {first.settings["op"], second.settings["op"]} == {"linear 8 -> 16", "paged_attention"}
    products = next(row for row in (first, second) if row.settings["op"] == "linear 8 -> 16")
    assert products.settings["tokens"] == 3
    assert products.measures["calls"] == 2
    assert products.measures["op_ms"] == pytest.approx(4e-3)
    assert products.measures["kernels_share"] == pytest.approx(0.5)
    # Each could have been done in a microsecond, and took two.
    assert products.measures["limit_share"] == pytest.approx(0.5)
    assert [span.duration_ns for span in times.spans[:3]] == [2000, 2000, 4000]


def test_nothing_seen_is_no_row() -> None:
    assert OpTimes().rows(None, "bfloat16") == []
