"""Experts that declare no seam, recognised by what they make of random tokens."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from transfuse.fusion.activation import activation_of
from transfuse.fusion.evaluate import overlapping_numbers
from transfuse.fusion.experts import FusedExperts, with_body
from transfuse.fusion.fused_class import fused_class
from transfuse.fusion.linears import caller, owner_of
from transfuse.fusion.plan import Fusion
from transfuse.fusion.query import number, op, output_of, unmoved
from transfuse.kernels import moe_ops
from transfuse.rewrite.branches import side_effect
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.source import MethodSource, RewriteRefused, method_source
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of
from transfuse.trace.structure import has_hooks

_NUM_TOKENS = 6
_TOLERANCE = 1e-4
_ROLES = ("up", "gate", "down")
_Settings = dict[str, Any]


def is_given_experts(trace: Trace) -> bool:
    """Whether a forward is given tokens, in a row or in rows, which experts each goes to, and the weights of those."""
    facts = [value_of(given) for given in trace.arguments.values()]
    if len(facts) != 3 or not all(isinstance(f, TensorFacts) for f in facts):
        return False
    x, indices, weights = facts
    is_routed = indices.shape == weights.shape and len(indices.shape) == 2 and indices.dtype == torch.int64
    is_whole = value_of(output_of(trace.graph)) == x and x.dtype.is_floating_point and weights.dtype.is_floating_point
    return is_routed and is_whole and len(x.shape) in (2, 3) and math.prod(x.shape[:-1]) == indices.shape[0]


def own_experts(trace: Trace, model: ModelTrace) -> FusedExperts:
    """The class with the op in the place of the forward.

    Raises:
        RewriteRefused: the experts compute something else, or cannot be tried.
    """
    module = caller(trace, model)
    source = method_source(trace.module_class.forward)
    _refuse_more(module, trace, source)
    trial = _Trial(module, trace)
    tried = (trial.completed(settings) for settings in _candidates(trial, trace, model))
    settings = next((found for found in tried if found is not None), None)
    if settings is None:
        raise RewriteRefused(f"{type(module).__name__} runs its experts in a way of its own ({source.where()})")
    method = compile_method(source, with_body(source, _call(settings, module, source, trial)))
    names = {role: settings[role].name for role in _ROLES if settings[role] is not None}
    details = {name: value for name, value in settings.items() if name not in _ROLES}
    styles = {name: "row" if role == "down" else "column" for role, name in names.items()}
    details |= {"num_experts": settings["down"].num_experts}
    fusion = Fusion("experts", (), ("experts",), sharding=styles, details=details)
    return FusedExperts(fused_class(trace.module_class, method.function, {}), fusion, method.text, source.text)


def _refuse_more(module: nn.Module, trace: Trace, source: MethodSource) -> None:
    """See that what the forward does shows in its result, and that it can be tried at its full size."""
    given = source.tree.args
    if len(given.args) != 4 or given.vararg or given.kwarg or given.kwonlyargs:
        raise RewriteRefused(f"{type(module).__name__} is given more than tokens, indices and weights")
    asks = [n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and n.attr == "training"]
    more = next(iter(asks), None) or side_effect(source.tree.body)
    counts = any(not buffer.is_floating_point() for buffer in module.buffers())
    if more is not None or counts or any(has_hooks(part) for part in module.modules()):
        raise RewriteRefused(f"{type(module).__name__} does more than run experts ({source.where(more)})")
    for node in trace.graph.nodes:
        weights = [n for n in node.all_input_nodes if unmoved(n).op == "get_attr" and len(value_of(n).shape) == 3]
        if weights and op(node) in ("bmm", "matmul", "einsum", "baddbmm"):
            raise RewriteRefused(f"{type(module).__name__} runs all experts on all tokens ({source.where()})")


@dataclasses.dataclass(frozen=True)
class _Weight:
    """One matrix for each expert.

    Attributes:
        name: of the parameter.
        num_experts: matrices.
        is_flat: whether they are kept as rows of one matrix.
        is_transposed: whether each is kept as [in, out].
        shape: of one, as [out, in].
    """

    name: str
    num_experts: int
    is_flat: bool
    is_transposed: bool
    shape: tuple[int, int]

    def of(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """[num_experts, out, in]."""
        tensor = parameters[self.name]
        tensor = tensor.view(self.num_experts, -1, tensor.shape[-1]) if self.is_flat else tensor
        return tensor.transpose(1, 2) if self.is_transposed else tensor

    def text(self, owner: nn.Module, *, transposed: bool) -> str:
        """For source code, transposed already or not."""
        child, _, name = self.name.rpartition(".")
        found = f"{owner_of(owner, child) if child else 'self'}.{name}"
        rows = self.shape[1] if self.is_transposed else self.shape[0]
        columns = self.shape[0] if self.is_transposed else self.shape[1]
        found += f".view({self.num_experts}, {rows}, {columns})" if self.is_flat else ""
        return found + (".transpose(1, 2)" if self.is_transposed != transposed else "")


class _Result(NamedTuple):
    """What experts made of some tokens."""

    x: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    found: torch.Tensor


class _Trial:
    """What experts make of random tokens, with weights that take little memory.

    Args:
        module: the experts.
        trace: their recording.
    """

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self._module = module
        x, indices = (value_of(given) for given in list(trace.arguments.values())[:2])
        self.size, self._k = x.shape[-1], indices.shape[1]
        self.num_dimensions = len(x.shape)
        self._generator = torch.Generator().manual_seed(0)
        self.parameters = {name: overlapping_numbers(p.shape, self._generator) for name, p in module.named_parameters()}
        self._buffers = {name: overlapping_numbers(b.shape, self._generator) for name, b in module.named_buffers()}
        self._results: dict[tuple[int, ...], _Result | None] = {}

    def completed(self, settings: _Settings) -> _Settings | None:
        """The settings and what becomes of tokens that go to no expert; None where the op gives something else."""
        size = settings["down"].num_experts
        count = min(size, max(self._k, 2))
        every = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
        others = tuple(expert for expert in every if expert != size - 1)[1 - count :]
        one, two = (1, _NUM_TOKENS), (2, _NUM_TOKENS // 2)
        for chosen, lengths in ((tuple(every[:count]), one), ((*others, size - 1), two)):
            result = self._tried(chosen, lengths)
            if result is None or not self._is_alike(settings, False, result):
                return None
        # Where the experts fail for such indices, they are never given them.
        beyond = [self._tried((*others, size + more), one) for more in (0, 1)]
        found = [result for result in beyond if result is not None]
        for identity in (False, True):
            if all(self._is_alike(settings, identity, result) for result in found):
                return settings | {"identity": identity}
        return None

    def _is_alike(self, settings: _Settings, identity: bool, result: _Result) -> bool:
        up, gate, down = (settings[role] and settings[role].of(self.parameters) for role in _ROLES)
        rest = {name: settings[name] for name in ("layout", "limit", "offset")}
        x, indices, weights, found = result
        given = x.reshape(-1, self.size), indices, weights, up, None, down, None, settings["activation"]
        expected = moe_ops.experts(*given, gate=gate, identity=identity, **rest)
        return torch.allclose(found, expected.view_as(x), atol=_TOLERANCE, rtol=_TOLERANCE)

    def _tried(self, chosen: tuple[int, ...], lengths: tuple[int, ...]) -> _Result | None:
        """What tokens become that go to these experts, the last one among them; None where that fails."""
        if chosen not in self._results:
            self._results[chosen] = self._run(chosen, lengths)
        return self._results[chosen]

    def _run(self, chosen: tuple[int, ...], lengths: tuple[int, ...]) -> _Result | None:
        lengths = lengths if self.num_dimensions == 3 else (_NUM_TOKENS,)
        x = torch.randn(*lengths, self.size, generator=self._generator)
        rows = [torch.randperm(len(chosen), generator=self._generator)[: self._k] for _ in range(_NUM_TOKENS)]
        rows[0] = torch.arange(len(chosen)).flip(0)[: self._k]
        indices = torch.tensor(chosen)[torch.stack(rows)]
        weights = torch.rand(_NUM_TOKENS, self._k, generator=self._generator) + 0.5
        tensors = {**self.parameters, **self._buffers}
        try:
            with torch.no_grad(), torch.device("cpu"):
                found = torch.func.functional_call(self._module, tensors, (x.clone(), indices, weights))
        except Exception:
            # Whatever the model's own code raises outside of its model.
            return None
        is_alike = isinstance(found, torch.Tensor) and found.shape == x.shape
        return _Result(x, indices, weights, found) if is_alike else None


def _candidates(trial: _Trial, trace: Trace, model: ModelTrace) -> Iterator[_Settings]:
    """What the op could be told, by the sizes of the weights and what the recording shows."""
    nodes = list(_nodes(trace, model))
    activations = dict.fromkeys(name for node, t in nodes if (name := _activation(node, t, model)) is not None)
    bounds = [number(v) for node, _ in nodes if op(node) == "clamp" for v in (*node.args[1:], *node.kwargs.values())]
    limits = [None, *dict.fromkeys(value for value in bounds if value is not None and value > 0)]
    is_offset = any(op(node) == "add" and 1 in node.args for node, _ in nodes)
    for roles, activation, limit, offset in itertools.product(
        _roles(trial, caller(trace, model)), activations, limits, (0.0, 1.0) if is_offset else (0.0,)
    ):
        is_gated = roles["gate"] is not None or roles["up"].shape[0] != roles["down"].shape[1]
        layouts = ("halves", "swapped", "interleaved") if is_gated and roles["gate"] is None else ("halves",)
        for layout in layouts if is_gated else (None,):
            yield {
                **roles,
                "activation": activation,
                "layout": layout,
                "limit": limit,
                "offset": offset,
            }


def _nodes(trace: Trace, model: ModelTrace) -> Iterator[tuple[fx.Node, Trace]]:
    for path, found in model.traces.items():
        if path == trace.path or path.startswith(f"{trace.path}."):
            yield from ((node, found) for node in found.graph.nodes)


def _activation(node: fx.Node, trace: Trace, model: ModelTrace) -> str | None:
    found = activation_of(node, trace, model)
    return None if found is None else found[0]


def _roles(trial: _Trial, module: nn.Module) -> Iterator[dict[str, Any]]:
    """Which parameter is which matrix: two, the first with twice as many rows or without a gate, or three."""
    shapes = {name: tuple(tensor.shape) for name, tensor in trial.parameters.items()}
    if not 2 <= len(shapes) <= 3 or len({len(shape) for shape in shapes.values()}) != 1:
        return
    for names in itertools.permutations(shapes):
        for up, gate, down in itertools.product(*(_weights(name, shapes, module) for name in _in_roles(names))):
            inner = down.shape[1]
            is_fit = up.shape[1] == down.shape[0] == trial.size and up.num_experts >= down.num_experts
            if gate is None and is_fit and up.shape[0] in (inner, 2 * inner):
                yield {"up": up, "gate": gate, "down": down}
            if gate is not None and is_fit and up.shape[0] == inner and gate.shape == up.shape:
                yield {"up": up, "gate": gate, "down": down}


def _in_roles(names: tuple[str, ...]) -> tuple[str | None, str | None, str | None]:
    return (names[0], None, names[1]) if len(names) == 2 else (names[1], names[0], names[2])


def _weights(name: str | None, shapes: dict[str, tuple[int, ...]], module: nn.Module) -> list[Any]:
    """How a parameter may be a matrix for each expert."""
    if name is None:
        return [None]
    shape = shapes[name]
    if len(shape) == 3:
        sizes = [shape]
    elif len(shape) == 2:
        counts = {v for part in module.modules() for v in vars(part).values() if type(v) is int and 1 < v < shape[0]}
        sizes = [(count, shape[0] // count, shape[1]) for count in sorted(counts) if shape[0] % count == 0]
    else:
        return []
    return [
        _Weight(name, count, len(shape) == 2, is_transposed, (columns, rows) if is_transposed else (rows, columns))
        for count, rows, columns in sizes
        for is_transposed in (False, True)
    ]


def _call(settings: _Settings, module: nn.Module, source: MethodSource, trial: _Trial) -> str:
    x, indices, weights = (argument.arg for argument in source.tree.args.args[1:])
    up, gate, down = (settings[role] for role in _ROLES)
    is_transposed = all(weight.is_transposed for weight in (up, gate, down) if weight is not None)
    texts = {w: w.text(module, transposed=is_transposed) for w in (up, gate, down) if w is not None}
    given = [x if trial.num_dimensions == 2 else f"{x}.reshape(-1, {trial.size})", indices, weights]
    given += [texts[up], "None", texts[down], "None", repr(settings["activation"])]
    options = {name: settings[name] for name in ("layout", "limit", "offset", "identity")}
    options["is_transposed"] = is_transposed
    plain = {"layout": "halves", "limit": None, "offset": 0.0, "identity": False, "is_transposed": False}
    given += [f"{name}={value!r}" for name, value in options.items() if value != plain[name]]
    given += [] if gate is None else [f"gate={texts[gate]}"]
    call = f"torch.ops.transfuse.experts({', '.join(given)})"
    return call if trial.num_dimensions == 2 else f"{call}.view_as({x})"
