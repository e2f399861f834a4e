"""Runs a recorded module with its weights cut in two, as two devices would, in one process.

Every value is a pair, one for each device. Layers by columns of the result take the whole input and give a half each;
layers by rows take a half each, and their results are summed, so that both devices have the whole again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.attention import is_attention
from transfuse.fusion.linears import linear_of
from transfuse.fusion.plan import KindPlan
from transfuse.fusion.query import op
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of
from transfuse.trace.values import Constant

Pair = tuple[Any, Any]


def sharded(
    module: nn.Module, trace: Trace, model: ModelTrace, kind: KindPlan, given: Mapping[str, Any]
) -> list[torch.Tensor]:
    """What the module's forward returns, put together from two halves.

    Args:
        module: with its weights.
        trace: of its kind, recorded on inputs of the same shapes.
        model: all traces.
        kind: its plan.
        given: the forward's arguments by name.
    """
    cuts = Cuts(module, kind)
    values: dict[fx.Node, Pair] = {}
    whole: dict[fx.Node, bool] = {}
    for node in trace.graph.nodes:
        if node.op == "output":
            return _joined(node, values, whole)
        if node.op == "placeholder":
            value = next((given[name] for name, found in trace.arguments.items() if found is node), None)
            values[node], whole[node] = (value, value), True
            continue
        linear = linear_of(node, trace, model)
        if linear is not None:
            values[node], whole[node] = cuts.run(linear.name, values[linear.source], whole[linear.source])
            continue
        whole[node] = all(whole[inner] for inner in node.all_input_nodes)
        values[node] = (_run(node, module, values, 0), _run(node, module, values, 1))
    raise AssertionError("the graph has no output")


class Cuts:
    """The halves of a module's weights, as its plan says."""

    def __init__(self, module: nn.Module, kind: KindPlan) -> None:
        self._module = module
        self._fusions = {name: fusion for fusion in kind.fusions for name in fusion.sharding}

    def run(self, name: str, x: Pair, is_whole: bool) -> tuple[Pair, bool]:
        """A linear layer's result on both devices, and whether each has the whole of it."""
        fusion = self._fusions[name]
        module: Any = self._module.get_submodule(name)
        weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
        style, bias = fusion.sharding[name], module.bias
        if style == "replicated":
            assert is_whole, f"{name} is replicated and given a half"
            result = nn.functional.linear(x[0], weight, bias)
            return (result, result), True
        if style == "column":
            assert is_whole, f"{name} is cut by rows and given a half"
            rows = [self._rows(name, weight.shape[0], rank) for rank in (0, 1)]
            halves = [nn.functional.linear(x[0], weight[r], None if bias is None else bias[r]) for r in rows]
            return (halves[0], halves[1]), False
        columns = weight.chunk(2, dim=1)
        parts = x[0].chunk(2, dim=-1) if is_whole else x
        total = sum(nn.functional.linear(part, half) for part, half in zip(parts, columns, strict=True))
        total = total if bias is None else total + bias
        return (total, total), True

    def _rows(self, name: str, size: int, rank: int) -> torch.Tensor:
        """Rows of a weight that one device has: of each part of a packed weight, half of its groups or of its rows."""
        details = self._fusions[name].details
        groups = int(details.get("groups", 1) or 1)
        rows = torch.arange(size)
        if details.get("layout") in ("halves", "swapped") and len(self._fusions[name].children) == 1:
            return torch.cat([half.chunk(2)[rank] for half in rows.chunk(2)])
        if "sizes" not in details:
            return rows.chunk(2)[rank]
        if groups > 1:
            return rows.view(groups, -1).chunk(2)[rank].flatten()
        sizes = [int(part) for part in str(details["sizes"]).split("+")]
        return torch.cat([part.chunk(2)[rank] for part in rows.split(sizes)])


def _run(node: fx.Node, module: nn.Module, values: dict[fx.Node, Pair], rank: int) -> Any:
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    args, kwargs = (_plain(part, values, rank) for part in (node.args, node.kwargs))
    args = _fitting(node, args)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if is_attention(node):
        query, key, value = args[1:4]
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=True
        )
        return result.transpose(1, 2), None
    if getattr(node.target, "__name__", "") == "update" and not inspect.isbuiltin(node.target):
        return args[0], args[1]
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def _fitting(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes that the forward writes out, halved where they are of something that is cut."""
    source = node.args[0] if node.args else None
    facts = value_of(source)
    if not isinstance(facts, TensorFacts) or not isinstance(args[0], torch.Tensor) or args[0].shape == facts.shape:
        return args
    if op(node) in ("view", "reshape"):
        sizes = list(args[1] if isinstance(args[1], tuple | list | torch.Size) else args[1:])
        if -1 not in sizes:
            sizes[2] //= 2
        return args[0], tuple(sizes)
    if args[0].shape[-1] == facts.shape[-1]:
        return args
    if op(node) == "split":
        sizes = args[1]
        return args[0], sizes // 2 if isinstance(sizes, int) else [size // 2 for size in sizes], *args[2:]
    if op(node) == "getitem" and isinstance(args[1], tuple) and isinstance(args[1][-1], slice):
        last = args[1][-1]
        bounds = [None if bound is None else bound // 2 for bound in (last.start, last.stop)]
        return args[0], (*args[1][:-1], slice(*bounds, last.step))
    return args


def _attribute(module: nn.Module, name: str) -> Any:
    owner, _, own = name.rpartition(".")
    return getattr(module.get_submodule(owner), own)


def _plain(value: Any, values: dict[fx.Node, Pair], rank: int) -> Any:
    if isinstance(value, fx.Node):
        return values[value][rank]
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, tuple | list):
        return type(value)(_plain(item, values, rank) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, values, rank) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_plain(part, values, rank) for part in (value.start, value.stop, value.step)))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _joined(node: fx.Node, values: dict[fx.Node, Pair], whole: dict[fx.Node, bool]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
    for part in outputs:
        if isinstance(part, fx.Node):
            pair = values[part]
            results.append(pair[0] if whole[part] else torch.cat(pair, dim=-1))
    return results
