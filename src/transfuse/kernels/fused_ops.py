"""Plain-torch kernels of fused layers: the reference that faster ones are compared with, and what runs without them.

The ops are registered with torch (`torch.ops.transfuse.*`), and are one step to whoever records what a model computes.
Where a gradient is wanted, autograd sees the torch operations that an op is made of. Each counts its executions in
`executions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from transfuse.kernels.torch_ops import executions

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

_library = torch.library.Library("transfuse", "FRAGMENT")


def fused_op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function, made of torch operations, as the op of this schema, and has it count its executions."""
    name = schema.partition("(")[0]
    _library.define(schema)
    overload = getattr(torch.ops.transfuse, name).default

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            executions[name] += 1
            return function(*args, **kwargs)

        def differentiable(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and any(_wants_grad(arg) for arg in (*args, *kwargs.values())):
                return counted(*args, **kwargs)
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*args, **kwargs)

        _library.impl(name, counted, "CompositeExplicitAutograd")
        _library.impl(name, differentiable, "Autograd")
        return function

    return register


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x if x.dtype is torch.float64 else x.float()


@fused_op("rms_norm(Tensor x, Tensor? weight, float eps, float offset=0.0) -> Tensor")
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * (weight + offset)` over the last dimension (https://arxiv.org/abs/1910.07467).

    Computed in float32 and rounded once.

    Args:
        x: [..., H].
        weight: [H], or [..., H] with the last dimensions of `x`; None for none.
        eps: added to the mean square.
        offset: 1 where weights are kept around zero.
    """
    if weight is not None and (offset or weight.dim() > 1):
        weight = wide(weight) + offset
    if weight is not None and weight.dim() > 1:
        return (functional.rms_norm(wide(x), x.shape[-1:], None, eps) * weight).to(x.dtype)
    if weight is not None and weight.dtype != x.dtype:
        return functional.rms_norm(wide(x), x.shape[-1:], wide(weight), eps).to(x.dtype)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


@fused_op("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0) -> (Tensor, Tensor)")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `x` and `residual`, and its `rms_norm`."""
    total = x + residual
    return total, rms_norm(total, weight, eps, offset)


@fused_op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, str activation, bool norm_first=True, "
    "float offset=0.0) -> Tensor"
)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    activation: str,
    norm_first: bool = True,
    offset: float = 0.0,
) -> torch.Tensor:
    """`rms_norm(x) * activation(gate)`, or `rms_norm(x * activation(gate))`, rounded once.

    Args:
        x: [..., H].
        gate: the same.
        weight: see `rms_norm`.
        eps: see `rms_norm`.
        activation: a key of `ACTIVATIONS`.
        norm_first: whether the gate comes after the norm.
        offset: see `rms_norm`.
    """
    opened = ACTIVATIONS[activation](wide(gate))
    if norm_first:
        normed: torch.Tensor = rms_norm(wide(x), weight, eps, offset)
        return (normed * opened).to(x.dtype)
    result: torch.Tensor = rms_norm(wide(x) * opened, weight, eps, offset)
    return result.to(x.dtype)


@fused_op("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (https://arxiv.org/abs/1607.06450).

    Args:
        x: [..., H].
        weight: [H], or [..., H] with the last dimensions of `x`; None for none.
        bias: the same.
        eps: added to the variance.
    """
    if weight is not None and (weight.dim() > 1 or weight.dtype != x.dtype):
        normed = functional.layer_norm(wide(x), x.shape[-1:], None, None, eps) * wide(weight)
        return (normed if bias is None else normed + wide(bias)).to(x.dtype)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@fused_op("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)")
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `x` and `residual`, and its `layer_norm`."""
    total = x + residual
    return total, layer_norm(total, weight, bias, eps)


@fused_op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [..., K] and `weight` [N, K]."""
    return functional.linear(x, weight, bias)


@fused_op("linear_act(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor")
def linear_act(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """`activation(x @ weight.T + bias)`; activations are the keys of `ACTIVATIONS`."""
    return ACTIVATIONS[activation](functional.linear(x, weight, bias))


@fused_op(
    "linear_glu(Tensor x, Tensor weight, Tensor? bias, str activation, str layout='halves', float? limit=None, "
    "float offset=0.0) -> Tensor"
)
def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    layout: str = "halves",
    limit: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """A gated linear unit (https://arxiv.org/abs/2002.05202); see `glu`.

    Args:
        x: [..., K].
        weight: [2 * N, K].
        bias: [2 * N], or None.
        activation: a key of `ACTIVATIONS`.
        layout: how gate and up lie in the rows: `halves` (the gate first), `swapped` or `interleaved`.
        limit: see `glu`.
        offset: see `glu`.

    Returns:
        [..., N].
    """
    return glu(functional.linear(x, weight, bias), activation, layout, limit, offset)


def glu(
    gate_up: torch.Tensor, activation: str, layout: str = "halves", limit: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """`activation(min(gate, limit)) * (clamp(up, -limit, limit) + offset)` of `gate_up` [..., 2 * N]."""
    if layout == "interleaved":
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if layout == "swapped":
        gate, up = up, gate
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ACTIVATIONS[activation](gate) * (up + offset if offset else up)
