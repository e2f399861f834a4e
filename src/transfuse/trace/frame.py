"""One module's forward while it runs: which node of its graph each tensor came from."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from transfuse.trace.graph import Trace
from transfuse.trace.positions import Place, forward_code
from transfuse.trace.values import Constant, facts_of, holds_tensor, is_plain, is_record, parts_of

_NOWHERE = Place(None, ())


class Frame:
    """A module whose forward is running.

    Attributes:
        module: the module.
        trace: what is recorded of it so far.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.trace = Trace(type(module), path, forward_code(module), fx.Graph())
        self._nodes: dict[int, fx.Node] = {}
        # Identities stand for tensors only while these live.
        self._kept: list[torch.Tensor] = []

    def bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name what the forward is called with."""
        try:
            bound = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # it takes something else, and will say so; or it has no signature
            bound = {f"arg{i}": value for i, value in enumerate(args)} | kwargs
        for name, value in bound.items():
            if holds_tensor(value):
                node = self.trace.graph.placeholder(name)
                _describe(node, value, _NOWHERE)
                self.bind(value, node)
                self.trace.arguments[name] = node
            else:
                self.trace.arguments[name] = self.argument(value)

    def add(
        self,
        call: tuple[str, Any, tuple[Any, ...], dict[str, Any]],
        result: Any,
        place: Place,
        *,
        mutates: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        """Append an operation, whose arguments are already what `argument` made of them."""
        node = self.trace.graph.create_node(*call)
        _describe(node, result, place)
        node.meta["mutates"] = mutates
        if module is not None:
            node.meta["module"] = module
        self.bind(result, node)

    def bind(self, value: Any, node: fx.Node) -> None:
        """From now on, the tensors in `value` are what `node` computed."""
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._kept.append(value)
            return
        for take, key, item in parts_of(value):
            if holds_tensor(item):
                part = self.trace.graph.call_function(take, (node, key))
                _describe(part, item, _NOWHERE)
                self.bind(item, part)

    def rebind(self, tensor: torch.Tensor) -> None:
        """A tensor was changed in place by the operation that was added last."""
        self._nodes[id(tensor)] = next(iter(reversed(self.trace.graph.nodes)))
        self._kept.append(tensor)

    def argument(self, value: Any) -> Any:
        """`value` as a node sees it: tensors replaced by the nodes that made them."""
        if isinstance(value, torch.Tensor):
            return self._nodes.get(id(value)) or self._outside(value)
        if is_plain(value):
            return value
        if isinstance(value, tuple | list):
            items = [self.argument(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) or is_record(value):
            return {str(key): self.argument(item) for _, key, item in parts_of(value)}
        if isinstance(value, slice):
            return slice(*(self.argument(item) for item in (value.start, value.stop, value.step)))
        return Constant(value)

    def name_of(self, module: nn.Module) -> str | None:
        """How the forward's module calls one below it; None for one that is elsewhere."""
        return next((n for n, own in self.module.named_modules(remove_duplicate=False) if own is module), None)

    def _outside(self, tensor: torch.Tensor) -> fx.Node:
        """A parameter, a buffer, another tensor that the module keeps, or one that something unseen made."""
        graph = self.trace.graph
        named: list[tuple[str, Any]] = [*self.module.named_parameters(), *self.module.named_buffers()]
        name = next((name for name, own in (*named, *vars(self.module).items()) if own is tensor), None)
        with graph.inserting_before(next(iter(graph.nodes), None)):
            node = graph.placeholder("outside") if name is None else graph.create_node("get_attr", name)
        _describe(node, tensor, _NOWHERE)
        self.bind(tensor, node)
        return node


def _describe(node: fx.Node, result: Any, place: Place) -> None:
    node.meta.update(value=facts_of(result), position=place.position, helpers=place.helpers, mutates=False)


def same_graphs(one: Trace, other: Trace) -> bool:
    """Whether two recordings of a forward took the same steps, whatever the sizes of their tensors."""
    return _steps(one) == _steps(other)


def _steps(trace: Trace) -> list[object]:
    numbers = {node: index for index, node in enumerate(trace.graph.nodes)}

    def plain(value: Any) -> object:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, tuple | list):
            return tuple(map(plain, value))
        if isinstance(value, dict):
            return tuple((key, plain(item)) for key, item in value.items())
        if isinstance(value, slice):
            return plain((value.start, value.stop, value.step))
        return type(value.value) if isinstance(value, Constant) else value

    return [
        (
            node.op,
            node.target if isinstance(node.target, str) else _target(node.target),
            plain(node.args),
            plain(node.kwargs),
        )
        for node in trace.graph.nodes
    ]


def _target(function: Callable[..., Any]) -> object:
    return operator.getitem if function is getattr else function
