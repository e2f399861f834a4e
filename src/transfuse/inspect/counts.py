"""Counts the operations of a recorded forward, as `torch.fx` would for the whole model at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from transfuse.fusion.query import op
from transfuse.inspect.costs import is_layer_of_torch
from transfuse.trace.graph import ModelTrace, Trace

# In the order in which they are shown.
NODE_KINDS = ("call_function", "call_method", "call_module", "get_attr", "placeholder", "output")


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes of a whole model's graph.

    Modules written for the model are counted by what is in them; layers of `torch.nn` are one `call_module` each.
    Operators such as `+` are methods, as torch calls them.

    Attributes:
        by_kind: keys of `NODE_KINDS`.
        by_operation: functions, methods and classes of called modules, by name.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    by_operation: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.by_kind.values())


def count_nodes(model: ModelTrace) -> NodeCounts:
    """Count all modules of a recording, each as often as it was called."""
    modules = dict(model.root.named_modules())
    counts = NodeCounts()
    known: dict[int, NodeCounts] = {}
    for path, trace in model.traces.items():
        if path and _inside_leaf(path, modules):
            continue
        if id(trace) not in known:
            known[id(trace)] = _own(trace)
        calls = max(1, model.num_calls[path])
        for key, number in known[id(trace)].by_kind.items():
            counts.by_kind[key] += number * calls
        for key, number in known[id(trace)].by_operation.items():
            counts.by_operation[key] += number * calls
    root = model.traces.get("")
    if root is not None:
        counts.by_kind["placeholder"] += sum(n.op == "placeholder" and not _is_outside(n) for n in root.graph.nodes)
        counts.by_kind["output"] += sum(n.op == "output" for n in root.graph.nodes)
    return counts


def _own(trace: Trace) -> NodeCounts:
    counts = NodeCounts()
    for node in trace.graph.nodes:
        module = node.meta.get("module")
        if node.op == "get_attr" or _is_outside(node):
            counts.by_kind["get_attr"] += 1
        elif node.op in ("call_function", "call_method"):
            counts.by_kind[node.op] += 1
            counts.by_operation[_name(node)] += 1
        elif module is not None and _is_leaf(module):
            counts.by_kind["call_module"] += 1
            counts.by_operation[type(module).__name__] += 1
    return counts


def _name(node: fx.Node) -> str:
    target: Any = node.target
    is_own = str(getattr(target, "_qualified_op_name", "")).startswith("transfuse::")
    return f"transfuse.{op(node)}" if is_own else op(node)


def _is_outside(node: fx.Node) -> bool:
    """Whether a node stands for a tensor that came from nowhere: torch.fx would call it an attribute."""
    return node.op == "placeholder" and node.target == "outside"


def _is_leaf(module: nn.Module) -> bool:
    return is_layer_of_torch(module) and not isinstance(module, nn.Sequential)


def _inside_leaf(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is a leaf, or belongs to one."""
    parts = path.split(".")
    above = (modules[".".join(parts[: i + 1])] for i in range(len(parts)))
    return any(_is_leaf(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict) for module in above)
