"""What patterns of linear layers have in common: what is one, their joined weights, their places in the source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from transfuse.fusion.fuser import child_trace, is_simple
from transfuse.fusion.query import child, op, operands, output_of, tensor_inputs
from transfuse.layers.merged import MergedParameter
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, Position, Trace


@dataclass(frozen=True)
class Linear:
    """A call of a module that computes `x @ weight.T + bias` and nothing else.

    Attributes:
        name: of the module, within its caller.
        node: the call.
        source: x, its input.
        weight: name of its parameter.
        bias: name of its parameter, or None.
        is_transposed: whether the weight is kept as [in, out].
        in_features: size of the input.
        out_features: size of the output.
    """

    name: str
    node: fx.Node
    source: fx.Node
    weight: str
    bias: str | None
    is_transposed: bool
    in_features: int
    out_features: int

    def arguments(self, owner: str) -> str:
        """Weight and bias for source code, where `owner` is the module."""
        weight = f"{owner}.{self.weight}.t()" if self.is_transposed else f"{owner}.{self.weight}"
        return f"{weight}, {'None' if self.bias is None else f'{owner}.{self.bias}'}"


def linear_of(node: Any, trace: Trace, model: ModelTrace) -> Linear | None:
    """The linear layer that a node calls with one argument; None where it is anything else."""
    module = child(node)
    if module is None or len(node.args) + len(node.kwargs) != 1:
        return None
    source = node.args[0] if node.args else next(iter(node.kwargs.values()))
    found = linear_module(child_trace(trace, str(node.target), model))
    if found is None or not isinstance(source, fx.Node):
        return None
    weight, bias, is_transposed = found
    parameters = dict(module.named_parameters(recurse=False))
    if weight not in parameters or (bias is not None and bias not in parameters):
        return None
    sizes = tuple(parameters[weight].shape)
    rows, columns = reversed(sizes) if is_transposed else sizes
    return Linear(str(node.target), node, source, weight, bias, is_transposed, int(columns), int(rows))


def linear_module(trace: Trace | None) -> tuple[str, str | None, bool] | None:
    """Weight, bias and whether the weight is kept transposed, of a module that is one linear layer; else None."""
    if trace is None or not is_simple(trace):
        return None
    inputs = tensor_inputs(trace.graph)
    result = output_of(trace.graph)
    if len(inputs) != 1 or any(node.op == "call_module" for node in trace.graph.nodes):
        return None
    return _linear(result, inputs[0]) or _flattened(result, inputs[0]) or _product(result, inputs[0])


def _linear(node: Any, x: fx.Node) -> tuple[str, str | None, bool] | None:
    """`functional.linear(x, weight, bias)`."""
    if op(node) != "linear":
        return None
    values = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return _parts(values.get("weight"), values.get("bias"), False) if values.get("input") is x else None


def _flattened(node: Any, x: fx.Node) -> tuple[str, str | None, bool] | None:
    """`addmm(bias, x.view(-1, x.size(-1)), weight).view(…)`, which Transformers calls Conv1D."""
    if op(node) not in ("view", "reshape") or op(node.args[0]) != "addmm":
        return None
    bias, flat, weight = node.args[0].args[:3]
    is_flat = op(flat) in ("view", "reshape") and flat.args[0] is x
    keeps = node.meta["value"].shape[:-1] == x.meta["value"].shape[:-1]
    return _parts(weight, bias, True) if is_flat and keeps and not node.args[0].kwargs else None


def _product(node: Any, x: fx.Node) -> tuple[str, str | None, bool] | None:
    """`x @ weight` or `x @ weight.T`, with a bias added or without."""
    bias = None
    if op(node) == "add" and len(node.args) == 2:
        node, bias = node.args if op(node.args[0]) == "matmul" else reversed(node.args)
    pair = operands(node, "matmul")
    if pair is None or pair[0] is not x or node.args[0] is not x:
        return None
    turned = _untransposed(pair[1])
    return _parts(pair[1] if turned is None else turned, bias, turned is None)


def _untransposed(node: Any) -> Any:
    """The matrix of which a node is the transpose, or None."""
    is_attribute = op(node) == "getattr" and node.args[1] in ("T", "mT")
    swaps = op(node) == "transpose" and set(node.args[1:]) in ({0, 1}, {-1, -2}, {0, -1}, {1, -2})
    return node.args[0] if is_attribute or op(node) == "t" or swaps else None


def _parts(weight: Any, bias: Any, is_transposed: bool) -> tuple[str, str | None, bool] | None:
    if not _is_parameter(weight, 2) or (bias is not None and not _is_parameter(bias, 1)):
        return None
    return str(weight.target), None if bias is None else str(bias.target), is_transposed


def _is_parameter(node: Any, dimensions: int) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and len(node.meta["value"].shape) == dimensions


def place(node: fx.Node, inner: Collection[fx.Node] = ()) -> Position:
    """Where a node's expression stands in the forward itself.

    Args:
        node: may be computed in a function that the forward calls, if that does nothing else.
        inner: what that function may compute besides.

    Raises:
        RewriteRefused: it is computed elsewhere, or together with something else.
    """
    position: Position | None = node.meta.get("position")
    if position is None:
        raise RewriteRefused(f"{node} is not computed in the forward")
    # Several operations at one place are those of a function that is called there.
    others = [n for n in node.graph.nodes if n.meta.get("position") == position and n is not node]
    if any(other not in inner for other in others):
        raise RewriteRefused(f"{node} is computed in a function that the forward calls")
    return position


def owner_of(module: nn.Module, name: str) -> str:
    """A child for source code: `self.proj`, `self.layers[0]`, `self.experts['a']`."""
    text, parent = "self", module
    for part in name.split("."):
        is_list = isinstance(parent, nn.ModuleList | nn.Sequential) and part.isdigit()
        if is_list:
            text += f"[{part}]"
        else:
            text += f".{part}" if part.isidentifier() else f"._modules[{part!r}]"
        parent = parent.get_submodule(part)
    return text


def caller(trace: Trace, model: ModelTrace) -> nn.Module:
    """The first module of a kind."""
    return model.root.get_submodule(trace.path)


def called_function(node: ast.expr, names: dict[str, Any], owner: Any) -> Callable[..., Any] | None:
    """What a call calls, if that is a global function or a method of the module."""
    if isinstance(node, ast.Name):
        found = names.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = getattr(owner if node.value.id == "self" else names.get(node.value.id), node.attr, None)
    else:
        found = None
    return found if callable(found) else None


def input_of(edits: Edits, node: fx.Node) -> ast.expr:
    """The expression that a call of one argument is given, by place or by name.

    Raises:
        RewriteRefused: it is no such call.
    """
    call = edits.expression(place(node))
    if isinstance(call, ast.Call) and len(call.args) + len(call.keywords) == 1:
        found = call.args[0] if call.args else call.keywords[0].value
        is_named = not call.keywords or call.keywords[0].arg is not None
        if is_named and not isinstance(found, ast.Starred):
            return found
    raise RewriteRefused(f"{node.target} is not called with one argument ({edits.source.where(place(node))})")


def variable(edits: Edits, node: fx.Node) -> str:
    """The variable that a call of one argument is given.

    Raises:
        RewriteRefused: it is given an expression.
    """
    argument = input_of(edits, node)
    if not isinstance(argument, ast.Name):
        raise RewriteRefused(f"the input of {node.target} is no variable ({edits.source.where(argument)})")
    return argument.id


def joined_name(children: Sequence[str]) -> str:
    """`qkv_proj` for q_proj, k_proj, v_proj; `gate_up_proj` for gate_proj, up_proj; `w1_w3` for w1, w3."""
    names = [name.replace(".", "_") for name in children]
    # The longest part after an underscore that all of them end with.
    suffixes = [names[0][i:] for i, char in enumerate(names[0]) if char == "_"]
    suffix = next((s for s in suffixes if all(name.endswith(s) for name in names)), "")
    stems = [name.removesuffix(suffix) for name in names]
    joined = ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + suffix
    return joined if joined.isidentifier() else f"linear_{joined}"


class JoinedLinears:
    """Several linear children of one input whose rows are one matrix.

    Args:
        linears: in the order of their rows; none is transposed.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.children = tuple(linear.name for linear in linears)
        self.name = joined_name(self.children)
        self.sizes = tuple(linear.out_features for linear in linears)
        self.has_bias = any(linear.bias is not None for linear in linears)

    @property
    def attributes(self) -> dict[str, MergedParameter]:
        """What a class that uses them gets."""
        found = {f"{self.name}_weight": MergedParameter(self.children, "weight")}
        if self.has_bias:
            found[f"{self.name}_bias"] = MergedParameter(self.children, "bias")
        return found

    @property
    def merged(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that share storage."""
        return tuple(tuple(f"{c}.{p.parameter}" for c in self.children) for p in self.attributes.values())

    @property
    def arguments(self) -> str:
        """Weight and bias, for source code."""
        return f"self.{self.name}_weight, {f'self.{self.name}_bias' if self.has_bias else 'None'}"


def can_join(linears: Sequence[Linear]) -> bool:
    """Whether the weights of linear layers can be rows of one matrix, under the names that `nn.Linear` gives them."""
    return all(
        not linear.is_transposed and linear.weight == "weight" and linear.bias in ("bias", None) for linear in linears
    )


def refuse_changes(edits: Edits, name: str, first: Position, last: Position, *, is_bound: bool = False) -> None:
    """See that a variable stays the same from one expression to another, in branches that were not recorded too.

    Args:
        edits: of the method.
        name: of the variable.
        first: the one expression.
        last: the other.
        is_bound: whether the variable is bound by the statement of the first.

    Raises:
        RewriteRefused: it may be bound to something else or changed in place.
    """
    if edits.rebound_between(name, first, last, is_bound=is_bound):
        raise RewriteRefused(f"{name} may be another tensor by then ({edits.source.where(last)})")
    start, stop = edits.statement_at(first), edits.statement_at(last)
    for node in ast.walk(edits.source.tree):
        if not isinstance(node, ast.expr) or not start.lineno <= node.lineno < stop.lineno:
            continue
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
        changed = node.func.value if is_call else node.value if isinstance(node, ast.Subscript) else None  # type: ignore[attr-defined]
        is_changed = is_call or not isinstance(getattr(node, "ctx", None), ast.Load)
        if is_changed and isinstance(changed, ast.Name) and changed.id == name:
            raise RewriteRefused(f"{name} may be changed in place ({edits.source.where(node)})")
