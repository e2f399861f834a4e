"""Computes parts of a recorded forward with numbers, to find out what they amount to."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from transfuse.fusion.fuser import child_trace
from transfuse.fusion.query import output_of
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of
from transfuse.trace.values import Constant

_HALF = (torch.bfloat16, torch.float16)
# Between the beginnings of two rows of overlapping numbers.
_STEP = 3


class NotEvaluable(Exception):
    """Some node cannot be computed by itself; the message says which."""


class Evaluator:
    """Runs nodes of traces on the CPU in float32; what is not given, parameters first of all, is random.

    Args:
        model: all traces, for what children do.
        seed: of the random numbers.
        may_have_parameters: whether what needs parameters is computed; else it counts as what cannot be.
    """

    def __init__(self, model: ModelTrace, seed: int = 0, *, may_have_parameters: bool = True) -> None:
        self._model = model
        self._may_have_parameters = may_have_parameters
        self._generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, torch.Tensor] = {}

    def random(self, facts: Any) -> torch.Tensor:
        """Normal numbers in the shape of a tensor.

        Raises:
            NotEvaluable: it holds no floating-point numbers.
        """
        if not isinstance(facts, TensorFacts) or not facts.dtype.is_floating_point:
            raise NotEvaluable(f"{facts} is no tensor of numbers")
        return torch.randn(facts.shape, generator=self._generator)

    @torch.no_grad()
    def run(self, trace: Trace, wanted: Sequence[Any], given: Mapping[fx.Node, Any]) -> list[Any]:
        """Values of nodes, where those of others are given.

        Raises:
            NotEvaluable: a node on the way cannot be computed.
        """
        values: dict[fx.Node, Any] = dict(given)
        needed = _needed(wanted, given)
        with torch.device("cpu"):
            for node in trace.graph.nodes:
                if node in needed and node not in values:
                    values[node] = self._value(node, trace, values)
        return [self._plain(item, values) for item in wanted]

    def _value(self, node: fx.Node, trace: Trace, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            path = f"{trace.path}.{node.target}"
            if not self._may_have_parameters:
                raise NotEvaluable(f"{path} is a parameter")
            if path not in self.parameters:
                self.parameters[path] = self.random(value_of(node))
            return self.parameters[path]
        if node.op == "placeholder":
            return self.random(value_of(node))
        args, kwargs = self._plain(node.args, values), self._plain(node.kwargs, values)
        try:
            if node.op == "call_module":
                return self._call(node, trace, args, kwargs)
            target: Any = node.target
            if node.op == "call_method":
                name = {"bfloat16": "float", "half": "float"}.get(str(target), str(target))
                return getattr(args[0], name)(*args[1:], **kwargs)
            result = target(*args, **kwargs)
            return args[0] if result is None else result
        except NotEvaluable:
            raise
        except Exception as error:
            raise NotEvaluable(f"{node}: {type(error).__name__}: {error}") from error

    def _call(self, node: fx.Node, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = child_trace(trace, str(node.target), self._model)
        module = node.meta.get("module")
        if inner is None or not inner.is_complete or module is None:
            raise NotEvaluable(f"{node.target} was not recorded")
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        given = {inner.arguments[k]: v for k, v in bound.items() if isinstance(inner.arguments.get(k), fx.Node)}
        return self.run(inner, [output_of(inner.graph)], given)[0]

    def _plain(self, value: Any, values: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, Constant):
            return value.value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if value in _HALF if isinstance(value, torch.dtype) else False:
            return torch.float32
        if isinstance(value, tuple | list):
            return type(value)(self._plain(item, values) for item in value)
        if isinstance(value, dict):
            return {key: self._plain(item, values) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._plain(part, values) for part in (value.start, value.stop, value.step)))
        return value


def _needed(wanted: Sequence[Any], given: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """All nodes that have to be computed."""
    found: set[fx.Node] = set()
    waiting: list[fx.Node] = []
    fx.node.map_arg(list(wanted), waiting.append)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in given:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def overlapping_numbers(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random numbers of which one is in several places: weights of their full size would not fit."""
    columns = shape[-1] if shape else 1
    count = _STEP * math.prod(shape[:-1]) + columns
    strides = [_STEP * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    numbers = (torch.randn(count, generator=generator) / columns**0.5).to(dtype)
    return torch.as_strided(numbers, tuple(shape), (*strides, 1) if shape else ())
