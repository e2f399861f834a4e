"""Modules that are one feed-forward: gated or not, of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from transfuse.fusion.activation import activation_of
from transfuse.fusion.evaluate import overlapping_numbers
from transfuse.fusion.fuser import is_simple
from transfuse.fusion.glu import glu_of
from transfuse.fusion.linears import Linear, linear_of
from transfuse.fusion.query import output_of, tensor_inputs, uncast
from transfuse.kernels.fused_ops import ACTIVATIONS, glu
from transfuse.trace.graph import ModelTrace, Trace

_NUM_TOKENS = 6
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class FeedForward:
    """What a feed-forward computes.

    Attributes:
        up: its first linear layers: gate and up, one for both, or one without a gate.
        down: its last.
        activation: between them.
        layout: how gate and up lie in the rows; None without a gate.
        limit: see `kernels.fused_ops.glu`.
        offset: see there.
    """

    up: tuple[Linear, ...]
    down: Linear
    activation: str
    layout: str | None = None
    limit: float | None = None
    offset: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """What the op is told of it, less what it assumes anyway."""
        settings = {"layout": self.layout, "limit": self.limit, "offset": self.offset}
        plain = {"layout": "halves", "limit": None, "offset": 0.0}
        return {name: value for name, value in settings.items() if value != plain[name]}


def feed_forward_of(trace: Trace, model: ModelTrace) -> FeedForward | None:
    """The feed-forward that a module is; None for any other."""
    inputs = tensor_inputs(trace.graph)
    down = linear_of(output_of(trace.graph), trace, model)
    if not is_simple(trace) or len(inputs) != 1 or down is None:
        return None
    (x,) = inputs
    inner = uncast(down.source)
    glu = glu_of(inner, trace, model)
    if glu is not None and all(linear.source is x for linear in glu.linears):
        return FeedForward(glu.linears, down, glu.gate.activation, glu.layout, glu.gate.limit, glu.gate.offset)
    activated = activation_of(inner, trace, model)
    up = None if activated is None else linear_of(activated[1], trace, model)
    return None if activated is None or up is None or up.source is not x else FeedForward((up,), down, activated[0])


def computes(module: nn.Module, settings: FeedForward) -> bool:
    """Whether a module gives what these settings say, tried on random numbers."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: overlapping_numbers(tensor.shape, generator)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }

    def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return functional.linear(x, tensors[f"{linear.name}.weight"], tensors.get(f"{linear.name}.bias"))

    x = torch.randn(_NUM_TOKENS, settings.down.out_features, generator=generator)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = torch.func.functional_call(module, tensors, (x.clone(),))
    except Exception:
        # Whatever the model's own code raises outside of its model.
        return False
    inner = torch.cat([product(x, linear) for linear in settings.up], -1)
    if settings.layout is None:
        inner = ACTIVATIONS[settings.activation](inner)
    else:
        inner = glu(inner, settings.activation, settings.layout, settings.limit, settings.offset)
    expected = product(inner, settings.down)
    return isinstance(found, torch.Tensor) and torch.allclose(found, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
