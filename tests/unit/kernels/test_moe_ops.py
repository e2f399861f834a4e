"""Routing and experts against loops over tokens in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from transfuse.kernels import moe_ops  # noqa: F401  (registers the ops)

ops: Any = torch.ops.transfuse


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SCORES = {
    "softmax": lambda row: row.softmax(0),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda row: (1 + row.exp()).log().sqrt(),
}


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_routes(scoring: str, late: bool, normalise: bool, has_bias: bool, one_thread: None) -> None:
    logits, bias = numbers(6, 9), numbers(9, seed=1) if has_bias else None
    factors = numbers(9, seed=2)
    weights, indices = ops.route(
        logits, bias, 3, scoring, late=late, normalise=normalise, scale=1.5, expert_scale=factors
    )
    for row, found, chosen in zip(logits.double(), weights, indices, strict=True):
        scored = SCORES[scoring](row)
        choice = (row if late else scored) + (0 if bias is None else bias.double())
        best = choice.argsort(descending=True)[:3]
        assert chosen.tolist() == best.tolist()
        picked = row[best]
        share = SCORES[scoring](picked) if late else scored[best]
        share = share / share.sum() if normalise else share
        expected = share * 1.5 * factors.double()[best]
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("best_two", [False, True])
@pytest.mark.parametrize("fill", [None, 0.0])
def test_groups(best_two: bool, fill: float | None, one_thread: None) -> None:
    logits, bias = numbers(7, 12), numbers(12, seed=1)
    weights, indices = ops.route(
        logits, bias, 3, "sigmoid", num_groups=4, top_groups=2, best_two=best_two, fill=fill, normalise=True, eps=1e-20
    )
    for row, found, chosen in zip(logits.double(), weights, indices, strict=True):
        choice = (row.sigmoid() + bias.double()).tolist()
        groups = [sorted(choice[g * 3 : g * 3 + 3], reverse=True)[: 2 if best_two else 1] for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(groups[g]))[:2]
        masked = [c if e // 3 in best else (float("-inf") if fill is None else fill) for e, c in enumerate(choice)]
        expected = sorted(range(12), key=lambda e: -masked[e])[:3]
        assert sorted(chosen.tolist()) == sorted(expected)
        share = row.sigmoid()[chosen]
        torch.testing.assert_close(found.double(), share / share.sum(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cutoff", [0.02, 0.5])
def test_one_expert_after_the_other(cutoff: float, one_thread: None) -> None:
    logits = torch.cat([numbers(20, 9), numbers(20, 9, seed=1) * 0.02 + 1, numbers(20, 9, seed=2) * 0.02 - 1])
    weights, indices = ops.route(logits, None, 3, "sparsemixer", cutoff=cutoff)
    num_shared = 0
    for row, found, chosen in zip(logits.double().tolist(), weights, indices, strict=True):
        left = dict(enumerate(row))
        for weight, index in zip(found.tolist(), chosen.tolist(), strict=True):
            best = max(left, key=lambda e: left[e])
            assert index == best
            near = [e for e in left if (left[best] - left[e]) / max(abs(row[e]), left[best]) <= cutoff]
            num_shared += len(near) > 1
            expected = 1 / sum(math.exp(left[e] - left[best]) for e in near)
            assert weight == pytest.approx(expected, abs=1e-5)
            del left[best]
    assert num_shared > 10


def test_weights_are_rounded_once(one_thread: None) -> None:
    logits = numbers(4, 8).bfloat16()
    weights, _ = ops.route(logits, None, 2, "softmax", normalise=True, dtype=torch.bfloat16)
    exact, _ = ops.route(logits.float(), None, 2, "softmax", normalise=True)
    torch.testing.assert_close(weights, exact.bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("layout", ["halves", "interleaved", None])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts(is_transposed: bool, layout: str | None, has_bias: bool, one_thread: None) -> None:
    num_experts, size, inner = 5, 7, 3
    wide = inner if layout is None else 2 * inner
    x, weights = numbers(6, size), numbers(6, 2, seed=1)
    # The last expert is chosen by none, and one choice is none of them.
    indices = torch.tensor([[0, 1], [3, 0], [2, 1], [3, 2], [1, num_experts], [0, 3]])
    up, down = numbers(num_experts, wide, size, seed=2), numbers(num_experts, size, inner, seed=3)
    up_bias = numbers(num_experts, wide, seed=4) if has_bias else None
    down_bias = numbers(num_experts, size, seed=5) if has_bias else None
    given = (up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()) if is_transposed else (up, down)
    found = ops.experts(
        x, indices, weights, given[0], up_bias, given[1], down_bias, "silu", layout=layout, is_transposed=is_transposed
    )
    expected = torch.zeros(6, size, dtype=torch.float64)
    for token in range(6):
        for choice in range(2):
            expert = int(indices[token, choice])
            if expert == num_experts:
                continue
            h = up[expert].double() @ x[token].double() + (0 if up_bias is None else up_bias[expert].double())
            if layout is None:
                h = h * h.sigmoid()
            else:
                gate, other = (h[:inner], h[inner:]) if layout == "halves" else (h[::2], h[1::2])
                h = gate * gate.sigmoid() * other
            h = down[expert].double() @ h + (0 if down_bias is None else down_bias[expert].double())
            expected[token] += weights[token, choice].double() * h
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_gate_of_its_own(one_thread: None) -> None:
    x, weights, indices = numbers(6, 7), numbers(6, 2, seed=1), torch.tensor([[0, 1], [3, 0], [2, 1]] * 2)
    gate, up, down = numbers(4, 3, 7, seed=2), numbers(4, 3, 7, seed=3), numbers(4, 7, 3, seed=4)
    found = ops.experts(x, indices, weights, up, None, down, None, "silu", gate=gate)
    joined = ops.experts(x, indices, weights, torch.cat((gate, up), 1), None, down, None, "silu")
    torch.testing.assert_close(found, joined)


def test_experts_that_do_nothing(one_thread: None) -> None:
    x, weights = numbers(3, 7), numbers(3, 2, seed=1)
    up, down = numbers(6, 6, 7, seed=2), numbers(4, 7, 3, seed=3)
    indices = torch.tensor([[0, 4], [5, 3], [5, 4]])
    found = ops.experts(x, indices, weights, up, None, down, None, "silu", identity=True)
    without = ops.experts(x, indices, weights, up, None, down, None, "silu")
    share = (weights * (indices > 3)).sum(-1, keepdim=True)
    torch.testing.assert_close(found, without + share * x)
    assert not without[2].any()


def test_weights_on_the_inputs(one_thread: None) -> None:
    x, weights, indices = numbers(3, 7), numbers(3, 2, seed=1), torch.tensor([[0, 1], [3, 0], [2, 1]])
    up, down = numbers(4, 6, 7, seed=2), numbers(4, 7, 3, seed=3)
    found = ops.experts(x, indices, weights, up, None, down, None, "silu", weigh_inputs=True)
    for choice in range(2):
        one, ones = indices[:, choice : choice + 1], torch.ones(3, 1)
        scaled = x * weights[:, choice : choice + 1]
        found = found - ops.experts(scaled, one, ones, up, None, down, None, "silu")
    torch.testing.assert_close(found, torch.zeros(3, 7), atol=1e-5, rtol=0)


def test_gradients(one_thread: None) -> None:
    x, weights = numbers(4, 3).double(), numbers(4, 2, seed=1).double()
    up, down = numbers(3, 4, 3, seed=2).double(), numbers(3, 3, 2, seed=3).double()
    indices = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
    inputs = [tensor.requires_grad_() for tensor in (x, weights, up, down)]
    assert torch.autograd.gradcheck(lambda a, w, u, d: ops.experts(a, indices, w, u, None, d, None, "silu"), inputs)

    def others(a: torch.Tensor, w: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        scaled = ops.experts(a, indices, w, u[:, :2], None, d, None, "silu", gate=u[:, 2:], weigh_inputs=True)
        return scaled + ops.experts(a, indices + 2, w, u, None, d, None, "silu", identity=True)

    assert torch.autograd.gradcheck(others, inputs)
