"""Which kernels compute a recorded operation, by the operation's name."""

from __future__ import annotations

from collections.abc import Callable

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import FLOATS, NativeOp
from transfuse.program.views import NotNative

Rule = Callable[[TorchOp, Graph], list[NativeOp]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function that gives the kernels of operations of these names, or raises `NotNative`."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def floating(*views: View | None) -> None:
    """Refuses tensors that kernels do not compute with."""
    for view in views:
        if view is not None and view.dtype not in FLOATS:
            raise NotNative(f"no kernel for {view.dtype}")


def number(value: object) -> float:
    """A number that is the same in every step."""
    if not isinstance(value, int | float):
        raise NotNative("a number that depends on the step")
    return float(value)


@rule("aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default", "aten.empty_strided.default")
def _empty(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """Only memory, which the program plans."""
    return []
