"""RMSNorm with a gate beside it: `norm(x) * silu(gate)`, or `norm(x * silu(gate))`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from transfuse.fusion.activation import activation_of
from transfuse.fusion.fuser import Fuser, Match, Refusal, is_simple
from transfuse.fusion.norm import keeps_type, rms_norm_of
from transfuse.fusion.query import either_way, output_of, tensor_inputs, uncast
from transfuse.rewrite.edit import Edits
from transfuse.trace.graph import ModelTrace, Trace


class GatedNormFuser(Fuser):
    """Replaces the forward of a module that normalises one tensor and gates it with another."""

    name = "gated_norm"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        inputs = tensor_inputs(trace.graph)
        if len(inputs) != 2 or not is_simple(trace) or not keeps_type(trace, inputs[0]):
            return
        found = _gated(uncast(output_of(trace.graph)), trace, model)
        if found is None or (found["x"], found["gate"]) != tuple(inputs):
            return
        names = {node: name for name, node in trace.arguments.items() if isinstance(node, fx.Node)}
        if not all(node in names for node in inputs):
            return
        weight = "None" if found["weight"] is None else f"self.{found['weight']}"
        call = (
            f"torch.ops.transfuse.gated_rms_norm({names[inputs[0]]}, {names[inputs[1]]}, {weight}, {found['eps']!r}, "
            f"{found['activation']!r}, {found['norm_first']}, {found['offset']!r})"
        )

        def rewrite(edits: Edits) -> None:
            edits.replace_body(f"return {call}")

        details = {key: found[key] for key in ("eps", "offset", "activation", "norm_first")}
        nodes = frozenset(node for node in trace.graph.nodes if node.op != "placeholder")
        yield Match(self.name, nodes, (), ("gated_rms_norm",), rewrite, sharding={"": "replicated"}, details=details)


def _gated(result: Any, trace: Trace, model: ModelTrace) -> dict[str, Any] | None:
    """What is normalised and what gates it, in either order."""
    for normed, gated in either_way(result, "mul"):
        norm, gate = rms_norm_of(normed), activation_of(gated, trace, model)
        if norm is not None and gate is not None:
            return _described(norm, norm[1], gate, norm_first=True)
    norm = rms_norm_of(result)
    for x, gated in either_way(norm[1], "mul") if norm is not None else ():
        gate = activation_of(gated, trace, model)
        if norm is not None and gate is not None:
            return _described(norm, x, gate, norm_first=False)
    return None


def _described(norm: Any, x: Any, gate: tuple[str, Any], *, norm_first: bool) -> dict[str, Any]:
    _, _, eps, weight, _, offset = norm
    return {
        "x": uncast(x),
        "gate": uncast(gate[1]),
        "activation": gate[0],
        "eps": eps,
        "weight": weight,
        "offset": offset,
        "norm_first": norm_first,
    }
