"""Counts the multiplications and additions of recorded operations that contract tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from transfuse.fusion.query import op
from transfuse.trace.graph import TensorFacts, value_of

_LINEAR = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "addbmm", "einsum", "scaled_dot_product_attention"})


class Row(NamedTuple):
    """The tokens that a recorded forward was run on."""

    num_tokens: int
    length: int


class Flops(NamedTuple):
    """Floating-point operations of a token: fixed, and for each position that it attends to."""

    fixed: float = 0.0
    per_position: float = 0.0

    def __add__(self, other: tuple[Any, ...]) -> Flops:
        """Both of each."""
        fixed, per_position = other
        return Flops(self.fixed + fixed, self.per_position + per_position)


def flops_of(node: fx.Node, row: Row) -> Flops:
    """What one operation costs a token: two for each multiplication with its addition, everything else left out.

    A product in which the row's length occurs twice is one of tokens with tokens: it grows with the context.
    """
    name = op(node)
    result = value_of(node)
    if name not in _LINEAR | _PRODUCTS or not isinstance(result, TensorFacts):
        return Flops()
    if name == "scaled_dot_product_attention":
        return _attention(node, row)
    inner = _contracted(name, node)
    total = 2.0 * math.prod(result.shape) * math.prod(inner)
    if name in _PRODUCTS and not _reads_parameter(node) and [*result.shape, *inner].count(row.length) > 1:
        return Flops(0.0, total / row.num_tokens / row.length)
    return Flops(total / row.num_tokens, 0.0)


def _attention(node: fx.Node, row: Row) -> Flops:
    query, key, value = (value_of(argument).shape for argument in node.args[:3])
    total = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return Flops(0.0, total / row.num_tokens / row.length) if key[-2] == row.length else Flops(total / row.num_tokens)


def _contracted(name: str, node: fx.Node) -> tuple[int, ...]:
    """The dimensions that are summed over."""
    if name == "einsum":
        return _einsum(node)
    if name.startswith("conv"):
        return tuple(_shape(node, 1, "weight")[1:])
    first = 1 if name in ("addmm", "baddbmm", "addbmm") else 0
    names = {"linear": "input", "addmm": "mat1", "baddbmm": "batch1", "addbmm": "batch1", "bmm": "input"}
    shape = _shape(node, first, names.get(name, "input"))
    return (shape[-1], shape[0]) if name == "addbmm" else tuple(shape[-1:])


def _einsum(node: fx.Node) -> tuple[int, ...]:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for labels, operand in zip(inputs.split(","), operands, strict=False):
        facts = value_of(operand)
        named = labels.replace("...", "")
        if isinstance(facts, TensorFacts) and named:
            sizes |= dict(
                zip(named, facts.shape[-len(named) :] if labels.startswith("...") else facts.shape, strict=False)
            )
    return tuple(size for label, size in sizes.items() if label not in output)


def _shape(node: fx.Node, index: int, name: str) -> tuple[int, ...]:
    argument = node.args[index] if len(node.args) > index else node.kwargs.get(name)
    facts = value_of(argument)
    return facts.shape if isinstance(facts, TensorFacts) else torch.Size()


def _reads_parameter(node: fx.Node) -> bool:
    return any(source.op == "get_attr" for source in node.all_input_nodes)
