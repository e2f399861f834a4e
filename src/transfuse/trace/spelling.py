"""Spells a call of torch the way `torch.fx` writes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"),
)
# Operators arrive as methods; torch.fx spells them as functions of the operator module.
_OPERATORS: dict[str, Callable[..., Any]] = {f"__{n.rstrip('_')}__": getattr(operator, n) for n in _BINARY}
_OPERATORS |= {f"__{name}__": getattr(operator, name) for name in ("neg", "pos", "invert", "getitem", "setitem")}
_OPERATORS |= {
    f"__i{n.rstrip('_')}__": getattr(operator, f"i{n.rstrip('_')}")
    for n in _BINARY
    if hasattr(operator, f"i{n.rstrip('_')}")
}
_OPERATORS |= {"__div__": operator.truediv, "__idiv__": operator.itruediv, "__abs__": operator.abs}
# `2 - x` arrives as a method of `x`.
_REFLECTED = {f"__r{n.rstrip('_')}__": getattr(operator, n) for n in _BINARY[:11]} | {"__rdiv__": operator.truediv}


class Spelling(NamedTuple):
    """A call as a node of a graph.

    Attributes:
        op: `call_function` or `call_method`.
        target: the function, or the method's name.
        args: in the order that the target takes them.
    """

    op: str
    target: Any
    args: tuple[Any, ...]


def spell(func: Callable[..., Any], args: tuple[Any, ...]) -> Spelling:
    """Kind of node, target and arguments of a call that torch reports."""
    name = getattr(func, "__name__", str(func))
    if name in _OPERATORS and len(args) > 0:
        return Spelling("call_function", _OPERATORS[name], args)
    if name in _REFLECTED and len(args) > 1:
        return Spelling("call_function", _REFLECTED[name], (args[1], args[0], *args[2:]))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", "?"))
        return Spelling("call_function", getattr if name == "__get__" else setattr, (args[0], attribute, *args[1:2]))
    if func is getattr(torch.Tensor, name, None) or type(func).__name__ == "method_descriptor":
        return Spelling("call_method", name, args)
    return Spelling("call_function", func, args)
