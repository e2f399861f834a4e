"""A residual's addition and the norm of its sum, where a layer does both."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal, child_trace
from transfuse.fusion.linears import caller, owner_of, place
from transfuse.fusion.norm import Norm, norm_of
from transfuse.fusion.query import child, mutations_between, op
from transfuse.rewrite.edit import Edits, holds
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of


class ResidualNormFuser(Fuser):
    """`h = residual + x; n = norm(h)` as one op with two results."""

    name = "residual_norm"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            if child(node) is None or len(node.args) != 1 or node.kwargs or op(node.args[0]) != "add":
                continue
            norm = norm_of(child_trace(trace, str(node.target), model))
            total = node.args[0]
            if norm is None or not _adds_alike(total) or _is_in_function(total) or node.meta.get("helpers"):
                continue
            if mutations_between(trace.graph, total, node):
                yield Refusal(self.name, "a tensor is changed in place before the norm", node.meta.get("position"))
                continue
            yield self._match(total, node, norm, owner_of(caller(trace, model), str(node.target)))

    def _match(self, total: fx.Node, normed: fx.Node, norm: Norm, owner: str) -> Match:
        name = str(normed.target)

        def rewrite(edits: Edits) -> None:
            where, later = place(total), place(normed)
            addition = edits.expression(where)
            left, right = _summands(edits, addition)
            is_inside = holds(edits.expression(later), addition)
            if not is_inside and not edits.follows(where, later):
                raise RewriteRefused(f"{name} may run without the addition ({edits.source.where(later)})")
            first, second = edits.fresh("residual_sum"), edits.fresh(f"{name.replace('.', '_')}_out")
            call = norm.call("LEFT", owner, residual="RIGHT")
            edits.insert_before(where, f"{first}, {second} = {call}", LEFT=left, RIGHT=right)
            if not is_inside:
                edits.replace(where, first)
            edits.replace(later, second)

        details = {"eps": norm.eps, "offset": norm.offset}
        return Match(self.name, frozenset({total, normed}), (name,), (f"add_{norm.kind}",), rewrite, details=details)


def _is_in_function(total: fx.Node) -> bool:
    """Whether a function that the forward calls adds two things of its own making, such as halves of a rotation."""
    if not total.meta.get("helpers"):
        return False
    position = total.meta.get("position")
    return any(node.meta.get("position") == position for node in total.all_input_nodes)


def _summands(edits: Edits, addition: ast.expr) -> tuple[ast.expr, ast.expr]:
    """The two expressions that are added: `a + b`, `torch.add(a, b)`, `a.add(b)`."""
    if isinstance(addition, ast.BinOp) and isinstance(addition.op, ast.Add):
        return addition.left, addition.right
    if isinstance(addition, ast.Call) and isinstance(addition.func, ast.Attribute) and not addition.keywords:
        if len(addition.args) == 2 and ast.unparse(addition.func) == "torch.add":
            return addition.args[0], addition.args[1]
        if len(addition.args) == 1 and addition.func.attr == "add":
            return addition.func.value, addition.args[0]
    raise RewriteRefused(f"the residual is not added by + ({edits.source.where(addition)})")


def _adds_alike(node: fx.Node) -> bool:
    """Whether two tensors of one shape and type are added."""
    facts = [value_of(argument) for argument in node.args]
    return (
        not node.meta.get("mutates")
        and not node.kwargs
        and len(facts) == 2
        and isinstance(facts[0], TensorFacts)
        and facts[0] == facts[1] == value_of(node)
    )
