"""RMSNorm and LayerNorm in their spellings, as modules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal, is_simple
from transfuse.fusion.query import (
    either_way,
    is_same,
    number,
    op,
    operands,
    output_of,
    same_number,
    squared,
    tensor_inputs,
    uncast,
)
from transfuse.rewrite.edit import Edits
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of


@dataclass(frozen=True)
class Norm:
    """What a normalising module computes.

    Attributes:
        kind: `rms_norm` or `layer_norm`.
        eps: added to the mean square or the variance.
        weight: name of the parameter, or None.
        bias: name of the parameter, or None; of `layer_norm` only.
        offset: added to the weight.
        argument: name of the forward's argument that is normalised.
    """

    kind: str
    eps: float
    weight: str | None
    bias: str | None
    offset: float
    argument: str

    def call(self, x: str, owner: str = "self", residual: str | None = None) -> str:
        """The op's call, for source code: of `x`, or of its sum with `residual`."""
        weight = "None" if self.weight is None else f"{owner}.{self.weight}"
        bias = "None" if self.bias is None else f"{owner}.{self.bias}"
        settings = f"{bias}, {self.eps!r}" if self.kind == "layer_norm" else f"{self.eps!r}"
        settings += f", {self.offset!r}" if self.offset else ""
        if residual is None:
            return f"torch.ops.transfuse.{self.kind}({x}, {weight}, {settings})"
        return f"torch.ops.transfuse.add_{self.kind}({x}, {residual}, {weight}, {settings})"


class NormFuser(Fuser):
    """Replaces the forward of a module that does nothing but normalise."""

    name = "norm"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        norm = norm_of(trace)
        if norm is None:
            return

        def rewrite(edits: Edits) -> None:
            edits.replace_body(f"return {norm.call(norm.argument)}")

        yield Match(
            self.name,
            frozenset(node for node in trace.graph.nodes if node.op != "placeholder"),
            (),
            (norm.kind,),
            rewrite,
            sharding={"": "replicated"},
            details={"eps": norm.eps, "offset": norm.offset},
        )


def norm_of(trace: Trace | None) -> Norm | None:
    """What a module normalises, if it does nothing else."""
    if trace is None or not is_simple(trace):
        return None
    inputs = tensor_inputs(trace.graph)
    if len(inputs) != 1 or any(node.op == "call_module" for node in trace.graph.nodes):
        return None
    result = uncast(output_of(trace.graph))
    if not isinstance(result, fx.Node) or not keeps_type(trace, inputs[0]):
        return None
    # A centred one first: it normalises what it has centred in the way of the other.
    found = _library_norm(result) or _layer_norm(result) or rms_norm_of(result)
    if found is None or found[1] is not inputs[0]:
        return None
    argument = next((name for name, node in trace.arguments.items() if node is inputs[0]), None)
    kind, _, eps, weight, bias, offset = found
    return None if argument is None else Norm(kind, eps, weight, bias, offset, argument)


def keeps_type(trace: Trace, x: fx.Node) -> bool:
    """Whether the result is like the input, weights fit its last dimension, and nothing in between is rounded more."""
    facts = value_of(x)
    if not isinstance(facts, TensorFacts) or value_of(output_of(trace.graph)) != facts:
        return False
    for node in trace.graph.nodes:
        other = value_of(node)
        if not isinstance(other, TensorFacts):
            continue
        if other.dtype.is_floating_point and other.dtype.itemsize < facts.dtype.itemsize:
            return False
        if node.op == "get_attr" and other.shape != facts.shape[-len(other.shape) :]:
            return False
    return True


_Found = tuple[str, fx.Node, float, str | None, str | None, float]


def _library_norm(node: fx.Node) -> _Found | None:
    """`functional.rms_norm` or `functional.layer_norm` over the last dimension."""
    kind = op(node)
    if kind not in ("rms_norm", "layer_norm"):
        return None
    values = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), node.args, strict=False)) | node.kwargs
    if kind == "rms_norm":
        values = dict(zip(("input", "normalized_shape", "weight", "eps"), node.args, strict=False)) | node.kwargs
    x, eps = uncast(values.get("input")), number(values.get("eps"))
    shape: Any = values.get("normalized_shape")
    if not isinstance(x, fx.Node) or eps is None or len(shape) != 1:
        return None
    weight, bias = _parameter(values.get("weight")), _parameter(values.get("bias"))
    if (values.get("weight") is not None and weight is None) or (values.get("bias") is not None and bias is None):
        return None
    return kind, x, eps, weight, bias, 0.0


def rms_norm_of(node: fx.Node) -> _Found | None:
    """`x * rsqrt(mean(x²) + eps)`, weighted or not."""
    plain = _normalised(node)
    if plain is not None:
        return "rms_norm", plain[0], plain[1], None, None, 0.0
    for scale, rest in either_way(node, "mul"):
        weight = _weight(scale)
        plain = _normalised(rest)
        if weight is not None and plain is not None:
            return "rms_norm", plain[0], plain[1], weight[0], None, weight[1]
    return None


def _normalised(node: Any) -> tuple[fx.Node, float] | None:
    """`x` and `eps` of `x * rsqrt(mean(x²) + eps)` or `x / sqrt(mean(x²) + eps)`."""
    for x, factor in either_way(node, "mul"):
        eps = _inverse_rms(factor, x)
        if eps is not None:
            return x, eps
    pair = operands(node, "div")
    if pair is not None and op(pair[1]) == "sqrt":
        eps = _mean_square(uncast(pair[1].args[0]), pair[0])
        if eps is not None:
            return pair[0], eps
    return None


def _inverse_rms(node: Any, x: Any) -> float | None:
    """`eps` of `rsqrt(mean(x²) + eps)`, in its spellings."""
    if op(node) == "rsqrt":
        return _mean_square(uncast(node.args[0]), x)
    if op(node) == "pow" and len(node.args) == 2 and number(node.args[1]) == -0.5:
        return _mean_square(uncast(node.args[0]), x)
    if op(node) == "reciprocal" and op(uncast(node.args[0])) == "sqrt":
        return _mean_square(uncast(uncast(node.args[0]).args[0]), x)
    return None


def _mean_square(node: Any, x: Any) -> float | None:
    """`eps` of `mean(x², -1, keepdim=True) + eps`."""
    for mean, eps in either_way(node, "add"):
        if op(mean) == "mean" and number(eps) is not None and is_same(squared(uncast(mean.args[0])), x):
            dim = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
            keeps = mean.kwargs.get("keepdim", mean.args[2] if len(mean.args) > 2 else False)
            if dim in (-1, [-1], (-1,)) and keeps:
                return number(eps)
    return None


def _layer_norm(node: fx.Node) -> _Found | None:
    """`(x - mean) * rsqrt(var + eps)` written out, with weight and bias or without."""
    bias = None
    for rest, offset in either_way(node, "add"):
        if _parameter(offset) is not None:
            node, bias = rest, _parameter(offset)
            break
    weight = None
    for scale, rest in either_way(node, "mul"):
        if _parameter(scale) is not None:
            node, weight = rest, _parameter(scale)
            break
    for centred, factor in either_way(node, "mul"):
        pair = operands(centred, "sub")
        if pair is None or op(pair[1]) != "mean" or uncast(pair[1].args[0]) is not pair[0]:
            continue
        eps = _inverse_rms(factor, centred)
        if eps is not None:
            return "layer_norm", pair[0], eps, weight, bias, 0.0
    return None


def _weight(node: Any) -> tuple[str, float] | None:
    """A parameter, and what is added to it."""
    name = _parameter(node)
    if name is not None:
        return name, 0.0
    for parameter, offset in either_way(node, "add"):
        name, added = _parameter(parameter), number(offset)
        if name is not None and added is not None and same_number(added, 1.0):
            return name, 1.0
    return None


def _parameter(node: Any) -> str | None:
    """Name of the module's own parameter that a node reads."""
    node = uncast(node)
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None
