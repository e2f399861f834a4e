"""Linear layers that stand alone, and those with an activation after them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import fx, nn

from transfuse.fusion.activation import activation_of
from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.linears import Linear, caller, input_of, linear_module, linear_of, owner_of, place
from transfuse.fusion.query import between, mutations_between, op, used_elsewhere
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.liveness import assigned_names, readers
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, Trace


class ActivatedLinearFuser(Fuser):
    """`act(fc(x))` as one op."""

    name = "mlp"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            found = activation_of(node, trace, model)
            linear = None if found is None else linear_of(found[1], trace, model)
            if found is None or linear is None:
                continue
            nodes = between(node, linear.source)
            if used_elsewhere(nodes, node) is None and not mutations_between(trace.graph, linear.node, node):
                yield self._match(node, linear, found[0], nodes, owner_of(caller(trace, model), linear.name))

    def _match(self, activated: fx.Node, linear: Linear, activation: str, nodes: set[fx.Node], owner: str) -> Match:
        call = f"torch.ops.transfuse.linear_act(INPUT, {linear.arguments(owner)}, {activation!r})"

        def rewrite(edits: Edits) -> None:
            inner = place(linear.node)
            outer = place(activated, nodes)
            x = input_of(edits, linear.node)
            operand = _operand(edits, activated, nodes)
            if operand is edits.expression(inner):
                edits.replace(outer, call, INPUT=x)
                return
            statement = edits.statement_at(inner)
            is_assigned = assigned_names(statement) == [getattr(operand, "id", None)]
            if not is_assigned or getattr(statement, "value", None) is not edits.expression(inner):
                raise RewriteRefused(f"{linear.name} is not called where it is activated ({edits.source.where(outer)})")
            if any(read is not operand for read in readers(edits.source.tree, statement, str(operand.id))):  # type: ignore[attr-defined]
                raise RewriteRefused(
                    f"{linear.name} may be needed without the activation ({edits.source.where(outer)})"
                )
            edits.replace(inner, call, INPUT=x)
            edits.replace(outer, "ACTIVATED", ACTIVATED=operand)

        return Match(
            self.name, frozenset(nodes), (linear.name,), ("linear_act",), rewrite, sharding={linear.name: "column"}
        )


def _operand(edits: Edits, activated: fx.Node, nodes: set[fx.Node]) -> ast.expr:
    """The only thing that an activation's call is given besides constants.

    Raises:
        RewriteRefused: it is no such call.
    """
    where = place(activated, nodes)
    call = edits.expression(where)
    if isinstance(call, ast.Call):
        given = [argument for argument in call.args if not isinstance(argument, ast.Constant)]
        named = [keyword.value for keyword in call.keywords if not isinstance(keyword.value, ast.Constant)]
        is_method = isinstance(call.func, ast.Attribute) and activated.op == "call_method" and not given
        if is_method and isinstance(call.func, ast.Attribute):
            given = [call.func.value]
        if len(given) == 1 and not named and not isinstance(given[0], ast.Starred):
            return given[0]
    raise RewriteRefused(f"the activation is no call of one argument ({edits.source.where(where)})")


class LinearFuser(Fuser):
    """Any other linear layer, called by itself."""

    name = "linear"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            linear = linear_of(node, trace, model)
            if linear is not None:
                yield self._match(linear, owner_of(caller(trace, model), linear.name))

    def _match(self, linear: Linear, owner: str) -> Match:
        return Match(
            self.name,
            frozenset({linear.node}),
            (linear.name,),
            ("linear",),
            lambda edits: call_op(edits, linear, owner),
            sharding={linear.name: "row"},
        )


def call_op(edits: Edits, linear: Linear, owner: str) -> None:
    """Have the op run in the place of a linear layer's call."""
    call = f"torch.ops.transfuse.linear(INPUT, {linear.arguments(owner)})"
    edits.replace(place(linear.node), call, INPUT=input_of(edits, linear.node))


class LinearFunctionFuser(Fuser):
    """`functional.linear(x, self.weight)`: a module's own product, and what a linear layer itself does.

    A linear layer's own forward is rewritten only where it is called from source that cannot be: in a loop, in a
    function, in a container.
    """

    name = "linear_function"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        whole = linear_module(trace)
        calls = [node for node in trace.graph.nodes if op(node) == "linear" and node.op == "call_function"]
        by_place: dict[Any, list[fx.Node]] = {}
        for node in calls:
            if not node.meta.get("helpers"):
                by_place.setdefault(node.meta.get("position"), []).append(node)
        for position, nodes in by_place.items():
            if len(nodes) > 1:
                yield Refusal(self.name, "it runs several times in one forward", position)
            else:
                yield self._call(nodes[0], trace)
        if whole is not None and not calls:
            yield self._whole(trace, *whole)

    def _call(self, node: fx.Node, trace: Trace) -> Match:
        def rewrite(edits: Edits) -> None:
            call = edits.expression(place(node))
            if _is_super(call):
                _replace_super(edits, node, trace, call)
                return
            if any(name not in ("weight", "bias") for name in node.kwargs):
                raise RewriteRefused(f"the input is given by name ({edits.source.where(place(node))})")
            edits.change_call(place(node), "torch.ops.transfuse.linear")

        return Match(self.name, frozenset({node}), (), ("linear",), rewrite)

    def _whole(self, trace: Trace, weight: str, bias: str | None, is_transposed: bool) -> Match:
        x = next(name for name, node in trace.arguments.items() if isinstance(node, fx.Node))
        linear = Linear("", next(iter(trace.graph.nodes)), trace.arguments[x], weight, bias, is_transposed, 0, 0)

        def rewrite(edits: Edits) -> None:
            edits.replace_body(f"return torch.ops.transfuse.linear({x}, {linear.arguments('self')})")

        nodes = frozenset(node for node in trace.graph.nodes if node.op != "placeholder")
        return Match(self.name, nodes, (), ("linear",), rewrite)


def _is_super(call: ast.expr) -> TypeGuard[ast.Call]:
    """Whether an expression is `super().forward(...)`."""
    owner = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
    is_super = is_super and not owner.args  # type: ignore[union-attr]
    return is_super and isinstance(call, ast.Call) and call.func.attr == "forward"  # type: ignore[attr-defined]


def _replace_super(edits: Edits, node: Any, trace: Trace, call: ast.Call) -> None:
    """Have the op run in the place of the forward of `nn.Linear`, as a class derived from it calls that."""
    forwards = [vars(cls)["forward"] for cls in trace.module_class.__mro__ if "forward" in vars(cls)]
    forward = forwards[1] if len(forwards) > 1 else None
    if forward is not nn.Linear.forward or len(call.args) != 1 or call.keywords:
        raise RewriteRefused(f"super() is more than a linear layer ({edits.source.where(call)})")
    weight, bias = (None if given is None else f"self.{given.target}" for given in node.args[1:3])
    edits.replace(place(node), f"torch.ops.transfuse.linear(INPUT, {weight}, {bias})", INPUT=call.args[0])
