"""Rotary position embedding in a function that the forward calls, or written out, found by trying it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal, child_trace
from transfuse.fusion.linears import called_function, caller
from transfuse.fusion.norm import norm_of
from transfuse.fusion.query import op, unmoved
from transfuse.kernels import rotary_ops
from transfuse.rewrite.branches import is_straight
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, Position, TensorFacts, Trace, value_of

_DIMENSIONS = 4
# What a function may be given besides queries and keys.
_TABLES: tuple[tuple[str, ...], ...] = (("cos", "sin"), ("sin", "cos"), ("angles",))


@dataclass(frozen=True)
class _Rotation:
    """How a function rotates.

    Attributes:
        settings: of the op.
        tables: what the function is given after queries and keys, in order.
    """

    settings: dict[str, Any]
    tables: tuple[str, ...]


class RotaryFuser(Fuser):
    """A function of queries, keys, or both, and tables of cosines and sines, that gives what the op gives."""

    name = "rotary"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for position, nodes in _calls(trace).items():
            found = _turning(nodes)
            if found is not None:
                yield self._match(position, nodes, *found, caller(trace, model), _after_norm(nodes, trace, model))

    def _match(
        self,
        position: Position,
        nodes: list[fx.Node],
        turned: list[TensorFacts],
        tables: list[TensorFacts],
        owner: Any,
        after_norm: bool,
    ) -> Match:
        kernel = "rotary" if len(turned) > 1 else "rotate"
        details: dict[str, Any] = {"after_norm": after_norm}

        def rewrite(edits: Edits) -> None:
            call = edits.expression(position)
            where = edits.source.where(position)
            if not isinstance(call, ast.Call):
                raise RewriteRefused(f"no call of a function stands at {where}")
            name = ast.unparse(call.func)
            function = called_function(call.func, edits.source.function.__globals__, owner)
            if function is None or not is_straight(function):
                raise RewriteRefused(f"{name} may take several paths ({where})")
            given, constants = _arguments(call, len(turned), len(tables), where)
            rotation = _rotation(function, [name for name, _ in given], constants, turned, tables)
            if rotation is None:
                raise RewriteRefused(f"{name} rotates in a way of its own ({where})")
            details.update(rotation.settings)
            _replace(edits, position, kernel, rotation, given)

        return Match(self.name, frozenset(nodes), (), (kernel,), rewrite, details=details)


def _after_norm(nodes: list[fx.Node], trace: Trace, model: ModelTrace) -> bool:
    """Whether queries and keys are normalised head by head just before: the two can be one kernel."""
    group = set(nodes)
    inputs = {i for node in nodes for i in node.all_input_nodes if i not in group}
    return any(
        norm_of(child_trace(trace, str(found.target), model)) is not None
        for found in map(unmoved, inputs)
        if isinstance(found, fx.Node) and found.op == "call_module"
    )


def _calls(trace: Trace) -> dict[Position, list[fx.Node]]:
    """What was computed in each function that the forward called."""
    inside: dict[Position, list[fx.Node]] = {}
    where: dict[fx.Node, Position] = {}
    for node in trace.graph.nodes:
        position = node.meta.get("position") if node.meta.get("helpers") else None
        if position is None and op(node) == "getitem" and node.meta.get("position") is None:
            # One of several results of an operation.
            position = where.get(node.args[0])
        if position is not None:
            where[node] = position
            inside.setdefault(position, []).append(node)
    return inside


def _turning(nodes: list[fx.Node]) -> tuple[list[TensorFacts], list[TensorFacts]] | None:
    """Shapes of what a function turns, and of its tables, if its operations may be those of a rotation."""
    operations = {op(node) for node in nodes}
    is_real = "mul" in operations and operations & {"neg", "sub", "__neg__", "rsub"}
    if not is_real and "view_as_complex" not in operations:
        return None
    group = set(nodes)
    results = [node for node in nodes if any(user not in group for user in node.users)]
    inputs = list(dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in group))
    facts = [value_of(node) for node in results]
    if not 1 <= len(facts) <= 2 or not all(isinstance(f, TensorFacts) and len(f.shape) == _DIMENSIONS for f in facts):
        return None
    given: list[Any] = [value_of(node) for node in inputs]
    tables = list(given)
    for fact in facts:
        if fact not in tables:
            return None
        tables.remove(fact)
    is_table = all(isinstance(t, TensorFacts) and (t.dtype.is_floating_point or t.dtype.is_complex) for t in tables)
    return (facts, tables) if is_table and len(tables) in (1, 2) else None


def _arguments(
    call: ast.Call, num_turned: int, num_tables: int, where: str
) -> tuple[list[tuple[str | None, ast.expr]], dict[str | int, Any]]:
    """A call's tensors in order, with the names that they go by, and its constants by name or place."""
    given: list[tuple[str | None, ast.expr]] = []
    constants: dict[str | int, Any] = {}
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    for index, (name, value) in enumerate([*((None, a) for a in call.args), *named]):
        if isinstance(value, ast.Constant):
            constants[index if name is None else name] = value.value
        elif isinstance(value, ast.Starred) or (name is None and index >= len(call.args)):
            raise RewriteRefused(f"a call's arguments are not written out ({where})")
        else:
            given.append((name, value))
    if len(given) != num_turned + num_tables:
        raise RewriteRefused(f"a function is given more than what it turns and tables ({where})")
    return given, constants


def _replace(
    edits: Edits, position: Position, kernel: str, rotation: _Rotation, given: Sequence[tuple[str | None, ast.expr]]
) -> None:
    num_turned = len(given) - len(rotation.tables)
    holes = {f"TURNED_{index}": value for index, (_, value) in enumerate(given[:num_turned])}
    tables = dict(zip(rotation.tables, (value for _, value in given[num_turned:]), strict=True))
    if "angles" in tables:
        if not _is_cheap(tables["angles"]):
            raise RewriteRefused(f"the angles are computed where they are given ({edits.source.where(position)})")
        angles = ("ANGLES.real", "ANGLES.imag")
        holes["ANGLES"] = tables["angles"]
    else:
        angles = ("COS", "SIN")
        holes |= {"COS": tables["cos"], "SIN": tables["sin"]}
    turned = ", ".join(f"TURNED_{index}" for index in range(num_turned))
    settings = "".join(f", {name}={value!r}" for name, value in rotation.settings.items())
    edits.replace(position, f"torch.ops.transfuse.{kernel}({turned}, {', '.join(angles)}{settings})", **holes)


def _is_cheap(value: ast.expr) -> bool:
    """Whether an expression may be evaluated twice: a variable, moved to a device at most."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        return _is_cheap(value.func.value) and all(isinstance(a, ast.Name | ast.Attribute) for a in value.args)
    return isinstance(value, ast.Name)


def _rotation(
    function: Callable[..., Any],
    given: list[str | None],
    constants: dict[str | int, Any],
    turned: list[TensorFacts],
    tables: list[TensorFacts],
) -> _Rotation | None:
    """How a function rotates, found by comparing it with the op on random numbers; None if it does something else."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(facts.shape, generator=generator) for facts in turned]
    numbers = [torch.randn(facts.shape, generator=generator, dtype=_wide(facts.dtype)) for facts in tables]
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(
                *_by_place(given, [*xs, *numbers], constants), **_by_name(given, [*xs, *numbers], constants)
            )
    except Exception:
        # Whatever it raises on tensors of these shapes: it is not this function.
        return None
    found = found if isinstance(found, tuple | list) else (found,)
    for names in _TABLES:
        if len(names) != len(numbers) or numbers[0].is_complex() != (names == ("angles",)):
            continue
        by_name = dict(zip(names, numbers, strict=True))
        pair = (
            (by_name["angles"].real, by_name["angles"].imag)
            if "angles" in by_name
            else (by_name["cos"], by_name["sin"])
        )
        settings = settings_of(found, xs, pair)
        if settings is not None:
            return _Rotation(settings, names)
    return None


def settings_of(
    found: Sequence[Any], xs: list[torch.Tensor], pair: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any] | None:
    """With which settings the op gives `found`, what it assumes anyway left out; None where with none.

    Args:
        found: what became of `xs`.
        xs: what was turned.
        pair: cosines and sines.
    """
    for settings in _variants():
        if _gives(found, xs, pair, settings):
            return {key: value for key, value in settings.items() if value != _PLAIN[key]}
    return None


_PLAIN: dict[str, Any] = {"interleaved": False, "angles": "paired", "inverse": False, "heads": 1, "gathered": False}


def _variants() -> Iterator[dict[str, Any]]:
    choices = ((False, True), ("paired", "first", "single"), (False, True), (1, 2), (False, True))
    for values in itertools.product(*choices):
        settings = dict(zip(_PLAIN, values, strict=True))
        if settings["interleaved"] or not settings["gathered"]:
            yield settings


def _gives(
    found: Sequence[Any], xs: list[torch.Tensor], pair: tuple[torch.Tensor, ...], settings: dict[str, Any]
) -> bool:
    if len(found) != len(xs):
        return False
    for result, x in zip(found, xs, strict=True):
        try:
            expected = rotary_ops.rotate(x, *pair, **settings)
        except (RuntimeError, IndexError):  # tables of this shape cannot be meant so
            return False
        if expected.shape != result.shape or not torch.allclose(result, expected, atol=1e-5, rtol=1e-4):
            return False
    return True


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _by_place(given: list[str | None], tensors: list[torch.Tensor], constants: dict[str | int, Any]) -> list[Any]:
    """Arguments by place, with constants where they stood."""
    values: list[Any] = [tensor for name, tensor in zip(given, tensors, strict=True) if name is None]
    for index in sorted(key for key in constants if isinstance(key, int)):
        values.insert(index, constants[index])
    return values


def _by_name(given: list[str | None], tensors: list[torch.Tensor], constants: dict[str | int, Any]) -> dict[str, Any]:
    named = {key: value for key, value in constants.items() if isinstance(key, str)}
    return named | {name: tensor for name, tensor in zip(given, tensors, strict=True) if name is not None}
