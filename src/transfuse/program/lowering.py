"""Puts kernels of this package in the place of recorded operations, wherever one computes the same."""

from __future__ import annotations

from transfuse.program.graph import Graph, TorchOp
from transfuse.program.native import NativeOp
from transfuse.program.rules import RULES
from transfuse.program.views import NotNative


def lower(graph: Graph) -> tuple[list[NativeOp | TorchOp], dict[str, str]]:
    """The operations of a graph as kernels of this package, and torch's where there is none.

    Returns:
        The operations in order, and for each operation left to torch the reason, by name.
    """
    ops: list[NativeOp | TorchOp] = []
    left: dict[str, str] = {}
    for op in graph.ops:
        rule = RULES.get(op.name)
        try:
            if rule is None:
                raise NotNative("no kernel computes it")
            ops += [replace_name(native, op.name) for native in rule(op, graph)]
        except NotNative as error:
            left[op.name] = str(error)
            ops.append(op)
    return ops, left


def replace_name(op: NativeOp, name: str) -> NativeOp:
    """The op with the name of what it came from."""
    op.name = name
    return op
