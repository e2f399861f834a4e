"""Fused ops against what they stand for, written out in float64; odd sizes; gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from transfuse.kernels import fused_ops
from transfuse.kernels.torch_ops import executions

ops: Any = torch.ops.transfuse
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.double() + offset)


def layer(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = normed if weight is None else normed * weight.double()
    return normed if bias is None else normed + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (2, 5, 33)])
def test_rms_norm(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, offset: float, shape: tuple[int, ...], one_thread: None
) -> None:
    x = numbers(*shape, dtype=dtype) * 3
    weight = None if weight_dtype is None else numbers(shape[-1], dtype=weight_dtype, seed=1)
    close(ops.rms_norm(x, weight, 1e-5, offset), rms(x, weight, 1e-5, offset), dtype)
    residual = numbers(*shape, dtype=dtype, seed=2)
    total, normed = ops.add_rms_norm(x, residual, weight, 1e-5, offset)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    close(normed, rms(total, weight, 1e-5, offset), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(dtype: torch.dtype, has_weight: bool, has_bias: bool, one_thread: None) -> None:
    x = numbers(3, 33, dtype=dtype) * 3 + 1
    weight = numbers(33, dtype=dtype, seed=1) if has_weight else None
    bias = numbers(33, dtype=dtype, seed=2) if has_bias else None
    close(ops.layer_norm(x, weight, bias, 1e-5), layer(x, weight, bias, 1e-5), dtype)
    total, normed = ops.add_layer_norm(x, x.flip(0), weight, bias, 1e-5)
    torch.testing.assert_close(total, x + x.flip(0), atol=0, rtol=0)
    close(normed, layer(total, weight, bias, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_norms(dtype: torch.dtype, norm_first: bool, one_thread: None) -> None:
    x, gate, weight = (numbers(3, 17, dtype=dtype, seed=s) for s in range(3))
    weight = weight[0]
    opened = ACTIVATIONS["silu"](gate.double())
    expected = rms(x, weight, 1e-5, 1.0) * opened if norm_first else rms(x.double() * opened, weight, 1e-5, 1.0)
    close(ops.gated_rms_norm(x, gate, weight, 1e-5, "silu", norm_first, 1.0), expected, dtype)


def test_a_norm_with_weights_for_each_head(one_thread: None) -> None:
    x, weight = numbers(2, 5, 3, 8), numbers(3, 8, seed=1)
    close(ops.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6), torch.float32)
    close(ops.layer_norm(x, weight, weight, 1e-6), layer(x, weight, weight, 1e-6), torch.float32)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", fused_ops.ACTIVATIONS)
def test_linear_layers(dtype: torch.dtype, activation: str, one_thread: None) -> None:
    x, weight = numbers(2, 3, 17, dtype=dtype) / 4, numbers(11, 17, dtype=dtype, seed=1) / 4
    bias = numbers(11, dtype=dtype, seed=2)
    product = x.double() @ weight.double().T
    close(ops.linear(x, weight), product, dtype)
    close(ops.linear(x, weight, bias), product + bias.double(), dtype)
    close(ops.linear_act(x, weight, bias, activation), ACTIVATIONS[activation](product + bias.double()), dtype)


@pytest.mark.parametrize("layout", ["halves", "swapped", "interleaved"])
@pytest.mark.parametrize(("limit", "offset"), [(None, 0.0), (0.3, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear_units(
    layout: str, limit: float | None, offset: float, dtype: torch.dtype, one_thread: None
) -> None:
    x, weight, bias = numbers(5, 9, dtype=dtype), numbers(14, 9, dtype=dtype, seed=1), numbers(14, dtype=dtype, seed=2)
    x = x / 4
    product = x.double() @ weight.double().T + bias.double()
    gate, up = product[:, :7], product[:, 7:]
    if layout == "swapped":
        gate, up = up, gate
    if layout == "interleaved":
        gate, up = product[:, ::2], product[:, 1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = ACTIVATIONS["silu"](gate) * (up + offset)
    close(ops.linear_glu(x, weight, bias, "silu", layout, limit, offset), expected, dtype)


GRADIENTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), [(3, 5), (5,)]),
    "rms_norm, offset": (lambda x, w: fused_ops.rms_norm(x, w + 1.0, 1e-5), [(3, 5), (5,)]),
    "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), [(3, 5), (3, 5), (5,)]),
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), [(3, 5), (5,), (5,)]),
    "add_layer_norm": (lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-5), [(3, 5), (3, 5), (5,), (5,)]),
    "gated_rms_norm": (lambda x, g, w: ops.gated_rms_norm(x, g, w, 1e-5, "silu"), [(3, 5), (3, 5), (5,)]),
    "linear": (ops.linear, [(3, 5), (4, 5), (4,)]),
    "linear_act": (lambda x, w, b: ops.linear_act(x, w, b, "gelu"), [(3, 5), (4, 5), (4,)]),
    "linear_glu": (lambda x, w, b: ops.linear_glu(x, w, b, "silu"), [(3, 5), (8, 5), (8,)]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, one_thread: None) -> None:
    function, shapes = GRADIENTS[name]
    inputs = [numbers(*shape, seed=i).double().requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, inputs)


def test_each_call_counts(one_thread: None) -> None:
    executions.clear()
    ops.linear(numbers(1, 2), numbers(3, 2))
    ops.linear_act(numbers(1, 2), numbers(3, 2), None, "relu")
    functional.linear(numbers(1, 2), numbers(3, 2))
    assert executions == {"linear": 1, "linear_act": 1}
