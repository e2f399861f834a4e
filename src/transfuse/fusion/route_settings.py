"""The settings with which the routing op gives what a router gives, found by trying."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from transfuse.fusion.evaluate import Evaluator
from transfuse.fusion.linears import caller, owner_of
from transfuse.fusion.query import number, op
from transfuse.fusion.region import Routing, Vector
from transfuse.kernels import moe_ops
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

# Enough that a rule which differs for one token in ten is told apart.
_NUM_TRIALS = 24
_TOLERANCE = 1e-5
_SMALL = 1e-3


@dataclass(frozen=True)
class _Trial:
    """What a router makes of some logits."""

    logits: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    vectors: dict[Vector, torch.Tensor]

    def scale(self, candidate: dict[str, Any]) -> float | None:
        """The factor between these weights and the op's, if the experts are the same and it is one factor."""
        given = {key: self.vectors[v] if isinstance(v, Vector) else v for key, v in candidate.items()}
        found, chosen = moe_ops.route(self.logits, **given)
        order, expected = self.indices.argsort(-1), chosen.argsort(-1)
        if not torch.equal(self.indices.gather(-1, order), chosen.gather(-1, expected)):
            return None
        weights, found = self.weights.gather(-1, order).float(), found.gather(-1, expected)
        factor = (weights.sum() / found.sum()).item()
        is_close = torch.allclose(found * factor, weights, atol=_TOLERANCE, rtol=_TOLERANCE * 10)
        return factor if is_close and factor > 0 else None


def _is_vector(node: fx.Node, size: int) -> bool:
    facts = value_of(node)
    return isinstance(facts, TensorFacts) and facts.shape == (size,) and facts.dtype.is_floating_point


class Matching:
    """Finds the settings with which the op gives what a router gives.

    Args:
        routing: the router.
        trace: the recording that it is in.
        model: all traces.
    """

    def __init__(self, routing: Routing, trace: Trace, model: ModelTrace) -> None:
        self._routing, self._trace, self._model = routing, trace, model

    def settings(self) -> dict[str, Any] | None:
        """What to tell the op besides the logits, or None where nothing fits.

        Raises:
            NotEvaluable: the router cannot be run by itself.
        """
        tried = self._tried(0)
        others: list[_Trial] = []
        for candidate in self._candidates(tried.vectors):
            scale = tried.scale(candidate)
            if scale is None:
                continue
            others = others or [self._tried(seed) for seed in range(1, _NUM_TRIALS)]
            scales = [other.scale(candidate) for other in others]
            if all(other is not None and abs(other - scale) < _SMALL * scale for other in scales):
                return {**candidate, "scale": self._exact(scale), "dtype": value_of(self._routing.weights).dtype}
        return None

    def _tried(self, seed: int) -> _Trial:
        """What the router makes of random logits."""
        routing = self._routing
        facts = value_of(routing.logits)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(facts.shape, generator=generator) * 2
        if seed % 2 and _cutoffs(routing.nodes):
            # So near to each other that it matters which of them are.
            logits = logits * 0.01 + 1
        names = {node: name for name, node in self._trace.arguments.items() if isinstance(node, fx.Node)}
        vectors = {
            Vector(name): torch.randn(facts.shape[-1], generator=generator)
            for node, name in names.items()
            if _is_vector(node, facts.shape[-1])
        }
        given = {node: vectors[Vector(name)] for node, name in names.items() if Vector(name) in vectors}
        evaluator = Evaluator(self._model, seed)
        wanted = [routing.weights, routing.indices]
        weights, indices = evaluator.run(self._trace, wanted, {routing.logits: logits, **given})
        owner = caller(self._trace, self._model)
        for path, tensor in evaluator.parameters.items():
            if tensor.numel() == facts.shape[-1]:
                child, _, name = path.removeprefix(f"{self._trace.path}.").rpartition(".")
                source = f"{owner_of(owner, child) if child else 'self'}.{name}"
                vectors[Vector(source if tensor.dim() == 1 else f"{source}.flatten()")] = tensor.flatten()
        return _Trial(logits, weights, indices, vectors)

    def _candidates(self, vectors: Iterable[Vector]) -> Iterator[dict[str, Any]]:
        nodes = self._routing.nodes
        num_experts = value_of(self._routing.logits).shape[-1]
        eps, floor = _smallest(nodes, "add", 1), _clamp(nodes)
        roles: list[tuple[Vector | None, Vector | None]] = [(None, None)]
        roles += [(one, None) for one in vectors] + [(None, one) for one in vectors]
        roles += list(itertools.permutations(vectors, 2))
        for (bias, factor), groups, scoring, late, normalise in itertools.product(
            roles, _groups(nodes, num_experts), moe_ops.SCORINGS, (False, True), (False, True)
        ):
            yield {
                "bias": bias,
                "expert_scale": factor,
                "top_k": value_of(self._routing.indices).shape[-1],
                "scoring": scoring,
                "late": late,
                "normalise": normalise,
                "eps": eps if normalise else 0.0,
                "floor": floor if normalise else 0.0,
                **groups,
            }
        for cutoff in _cutoffs(nodes):
            top_k = value_of(self._routing.indices).shape[-1]
            yield {"bias": None, "top_k": top_k, "scoring": "sparsemixer", "cutoff": cutoff}

    def _exact(self, scale: float) -> float:
        """A factor as the source has it, where it has one that is as good as what was found."""
        written = [number(arg) for node in self._routing.nodes if op(node) == "mul" for arg in node.args]
        near = [value for value in (1.0, *written) if value is not None and abs(value - scale) < 1e-4 * abs(scale)]
        return near[0] if near else scale


def _smallest(nodes: frozenset[fx.Node], name: str, index: int) -> float:
    """A tiny number that is added somewhere, so that nothing is divided by zero; 0 for none."""
    values = [number(node.args[index]) for node in nodes if op(node) == name and len(node.args) > index]
    return next((value for value in values if value is not None and 0 < value < _SMALL), 0.0)


def _clamp(nodes: frozenset[fx.Node]) -> float:
    values = [
        number(node.kwargs.get("min", node.args[1] if len(node.args) > 1 else None))
        for node in nodes
        if op(node) == "clamp"
    ]
    return next((value for value in values if value is not None and 0 < value < _SMALL), 0.0)


def _cutoffs(nodes: frozenset[fx.Node]) -> list[float]:
    """Numbers that something is compared with."""
    values = [number(node.args[1]) for node in nodes if op(node) == "gt" and len(node.args) > 1]
    return list(dict.fromkeys(value for value in values if value is not None))


def _k(top: fx.Node) -> Any:
    """How many are chosen."""
    return top.kwargs.get("k", top.args[1] if len(top.args) > 1 else None)


def _groups(nodes: frozenset[fx.Node], num_experts: int) -> list[dict[str, Any]]:
    """How experts may be grouped, by the shapes of what is chosen from."""
    choices = [node for node in nodes if op(node) == "topk"]
    fills = [number(node.args[2]) for node in nodes if op(node) == "masked_fill" and len(node.args) > 2]
    found: list[dict[str, Any]] = [{}]
    for node in choices:
        facts = value_of(node.args[0])
        k = _k(node)
        if not isinstance(facts, TensorFacts) or not isinstance(k, int):
            continue
        num_groups = facts.shape[-1]
        if num_groups < 2 or num_experts % num_groups or num_groups == num_experts or k > num_groups:
            continue
        size = num_experts // num_groups
        best_two = any(_k(other) == 2 and value_of(other.args[0]).shape[-1] == size for other in choices)
        fill = next((value for value in fills if value is not None and value != float("-inf")), None)
        found.append({"num_groups": num_groups, "top_groups": k, "best_two": best_two, "fill": fill})
    return found
