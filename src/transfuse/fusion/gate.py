"""What a gated linear unit does with its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from transfuse.fusion.activation import activation_of
from transfuse.fusion.query import either_way, number, op, uncast
from transfuse.trace.graph import ModelTrace, Trace


@dataclass(frozen=True)
class Gate:
    """`activation(min(gate, limit)) * (clamp(up, -limit, limit) + offset)`.

    Attributes:
        activation: a key of `fused_ops.ACTIVATIONS`.
        gate: what is activated.
        up: what is multiplied with it.
        limit: of both, or None.
        offset: added to `up`.
    """

    activation: str
    gate: fx.Node
    up: fx.Node
    limit: float | None = None
    offset: float = 0.0

    def arguments(self, layout: str) -> str:
        """What the op is told, for source code; what it assumes anyway left out."""
        settings = [repr(self.activation)]
        if layout != "halves" or self.limit is not None or self.offset:
            settings.append(repr(layout))
        if self.limit is not None or self.offset:
            settings.append(repr(self.limit))
        if self.offset:
            settings.append(repr(self.offset))
        return ", ".join(settings)


def gate_of(gated: Any, up: Any, trace: Trace, model: ModelTrace) -> Gate | None:
    """The gate whose product is `gated * up`, or None where `gated` is not activated."""
    found = activation_of(gated, trace, model)
    if found is None:
        return None
    activation, gate = found
    up, offset = _without_offset(uncast(up))
    gate, upper = _clamped(uncast(gate), symmetric=False)
    up, both = _clamped(uncast(up), symmetric=True)
    if upper != both or not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or gate is up:
        return None
    return Gate(activation, gate, up, both, offset)


def _without_offset(node: Any) -> tuple[Any, float]:
    for rest, offset in either_way(node, "add"):
        if number(offset) is not None:
            return rest, float(offset)
    return node, 0.0


def _clamped(node: Any, symmetric: bool) -> tuple[Any, float | None]:
    """What is clamped, and to which limit: from above, or on both sides alike; None where it is not."""
    if op(node) not in ("clamp", "clip"):
        return node, None
    values = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
    low, high = values.get("min"), number(values.get("max"))
    expected = -high if symmetric and high is not None else None
    if high is None or low != expected:
        return node, None
    return uncast(node.args[0]), high
