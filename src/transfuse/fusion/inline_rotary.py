"""Rotary position embedding written out: `x * cos + rotate_half(x) * sin`, found by trying it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from transfuse.fusion.evaluate import Evaluator, NotEvaluable
from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.linears import called_function, caller, place
from transfuse.fusion.query import between, op
from transfuse.fusion.rotary import settings_of
from transfuse.rewrite.branches import is_straight
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

_DIMENSIONS = 4


@dataclass(frozen=True)
class _Turn:
    """A sum of two products that may be a rotation.

    Attributes:
        total: the sum.
        straight: the product with what is turned.
        crossed: the product with what its other half is turned by.
        x: what is turned.
        cos: its factor in the first product.
        other: its other half.
        sin: the factor of that.
    """

    total: fx.Node
    straight: fx.Node
    crossed: fx.Node
    x: fx.Node
    cos: fx.Node
    other: fx.Node
    sin: fx.Node


class InlineRotaryFuser(Fuser):
    """A sum of a tensor times cosines and its other half times sines, in one expression."""

    name = "rotary"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            for turn in _turns(node):
                settings = _settings(turn, trace, model)
                if settings is not None:
                    yield self._match(turn, settings, caller(trace, model))
                    break

    def _match(self, turn: _Turn, settings: dict[str, Any], owner: Any) -> Match:
        nodes = between(turn.total, turn.x, turn.cos, turn.sin)

        def rewrite(edits: Edits) -> None:
            where = place(turn.total)
            whole = edits.expression(where)
            products = [edits.expression(place(node)) for node in (turn.straight, turn.crossed)]
            if not isinstance(whole, ast.BinOp) or {id(whole.left), id(whole.right)} != set(map(id, products)):
                raise RewriteRefused(f"the rotation is no single expression ({edits.source.where(where)})")
            x, cos = _operands(edits, products[0], turn.straight, turn.x)
            other, sin = _operands(edits, products[1], turn.crossed, turn.other)
            if not isinstance(x, ast.Name) or isinstance(other, ast.Name):
                raise RewriteRefused(f"the rotation's halves are computed elsewhere ({edits.source.where(where)})")
            _refuse_paths(edits, other, owner)
            told = "".join(f", {name}={value!r}" for name, value in settings.items())
            edits.replace(where, f"torch.ops.transfuse.rotate(X, COS, SIN{told})", X=x, COS=cos, SIN=sin)

        details = {"after_norm": False, **settings}
        return Match(self.name, frozenset(nodes), (), ("rotate",), rewrite, details=details)


def _turns(node: fx.Node) -> Iterator[_Turn]:
    """The ways to read a node as a rotation."""
    products = node.args[:2]
    if op(node) != "add" or node.meta.get("helpers") or not all(op(product) == "mul" for product in products):
        return
    for one, two in itertools.permutations(products):
        assert isinstance(one, fx.Node)
        assert isinstance(two, fx.Node)
        for (x, cos), (other, sin) in itertools.product(*(itertools.permutations(p.args[:2]) for p in (one, two))):
            given = (x, cos, other, sin)
            if all(isinstance(part, fx.Node) for part in given) and x is not other and _is_tensor(x, other, node):
                turn = _Turn(node, one, two, x, cos, other, sin)  # type: ignore[arg-type]
                if x in between(other) and x not in between(sin) and x not in between(cos):
                    yield turn


def _is_tensor(x: Any, other: Any, total: Any) -> bool:
    facts = value_of(x)
    return (
        isinstance(facts, TensorFacts)
        and len(facts.shape) == _DIMENSIONS
        and facts == value_of(other) == value_of(total)
    )


def _settings(turn: _Turn, trace: Trace, model: ModelTrace) -> dict[str, Any] | None:
    evaluator = Evaluator(model)
    try:
        x, cos, sin = (evaluator.random(value_of(node)) for node in (turn.x, turn.cos, turn.sin))
        found = evaluator.run(trace, [turn.total], {turn.x: x, turn.cos: cos, turn.sin: sin})
    except NotEvaluable:
        return None
    return None if evaluator.parameters else settings_of(found, [x], (cos, sin))


def _operands(edits: Edits, product: ast.expr, node: fx.Node, first: fx.Node) -> tuple[ast.expr, ast.expr]:
    """The expressions of a product's factors, that of `first` before the other one."""
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        raise RewriteRefused(f"the product is not written with * ({edits.source.where(product)})")
    left, right = product.left, product.right
    return (left, right) if node.args[0] is first else (right, left)


def _refuse_paths(edits: Edits, other: ast.expr, owner: Any) -> None:
    """See that functions which take the other half do the same whatever they are given."""
    for part in ast.walk(other):
        if isinstance(part, ast.Call) and not _is_of_tensor(part.func):
            function = called_function(part.func, edits.source.function.__globals__, owner)
            if function is None or not is_straight(function):
                raise RewriteRefused(f"{ast.unparse(part.func)} may take several paths ({edits.source.where(part)})")


def _is_of_tensor(function: ast.expr) -> bool:
    """Whether a call is of a tensor's own method, not of the module's."""
    owner = function.value if isinstance(function, ast.Attribute) else None
    is_module = isinstance(owner, ast.Name) and owner.id in ("self", "torch")
    return isinstance(function, ast.Attribute) and not is_module and hasattr(torch.Tensor, function.attr)
