"""Experts that are modules of a list, run one by one in a loop of their owner's forward, as one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.expert_loop import Region, Survey, core, regions
from transfuse.fusion.expert_loop_trial import Loop, LoopTrial
from transfuse.fusion.feed_forward import FeedForward, computes, feed_forward_of
from transfuse.fusion.fuser import Fuser, Match, Refusal, child_trace
from transfuse.fusion.linears import Linear, caller, can_join, joined_name
from transfuse.fusion.query import between, op
from transfuse.fusion.settled import settled_of
from transfuse.layers.merged import MergedParameter
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import MethodSource, RewriteRefused, covers, method_source, position_of
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of
from transfuse.trace.structure import has_hooks, structure_of

_TOLERANCE = 1e-4
_NUM_TOKENS = 6


class ModuleListExpertsFuser(Fuser):
    """A list of feed-forwards that are alike, of which each token goes to some, its results weighed and summed."""

    name = "experts"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for experts, calls in _lists(trace, model).items():
            try:
                yield _match(experts, calls, trace, model)
            except RewriteRefused as error:
                yield Refusal(self.name, str(error), calls[0].meta.get("position"))


def _lists(trace: Trace, model: ModelTrace) -> dict[str, list[fx.Node]]:
    """Lists of modules that routed tokens are given to, by path within their owner, with the calls of their modules."""
    owner = caller(trace, model)
    found: dict[str, list[fx.Node]] = {}
    for node in trace.graph.nodes:
        if node.op != "call_module" or node.meta.get("module") is None:
            continue
        path = str(node.target).rpartition(".")[0]
        if isinstance(owner.get_submodule(path), nn.ModuleList):
            found.setdefault(path, []).append(node)
    if not found or not _is_routed(trace):
        return {}
    return {
        path: calls
        for path, calls in found.items()
        if len(owner.get_submodule(path)._modules) > 1 and not any(_depends(call, calls) for call in calls)
    }


def _is_routed(trace: Trace) -> bool:
    """Whether there are indices by token, and numbers in their shape."""
    facts = [value_of(node) for node in trace.graph.nodes]
    tensors = [one for one in facts if isinstance(one, TensorFacts) and len(one.shape) == 2]
    indices = {one.shape for one in tensors if one.dtype == torch.int64}
    return any(one.shape in indices for one in tensors if one.dtype.is_floating_point)


def _depends(call: fx.Node, others: list[fx.Node]) -> bool:
    """Whether a module is given what another one of the list made, as layers are."""
    behind = between(call) - {call}
    return any(other in behind for other in others)


def _match(name: str, calls: list[fx.Node], trace: Trace, model: ModelTrace) -> Match:
    owner = caller(trace, model)
    source = method_source(trace.module_class.forward)
    experts: Any = owner.get_submodule(name)
    expert = _alike(experts, calls, trace, model, source)
    region, loop = _loop(name, calls, trace, model, source, expert)
    weights = _Weights(owner, name, expert)
    call = _call(loop, expert, weights, owner)
    nodes = frozenset(
        node
        for node in trace.graph.nodes
        if (position := node.meta.get("position")) is not None
        and any(covers(part, position) for part in region.code)
        and not any(covers(part, position) for part in region.arguments.values())
    )

    def rewrite(edits: Edits) -> None:
        if region.expression is not None:
            position = position_of(region.expression)
            assert position is not None
            edits.replace(position, call, **region.arguments)
        else:
            edits.replace_statements(
                region.statements, f"return {call}" if region.result is None else f"{region.result} = {call}"
            )

    details = {"activation": expert.activation, "layout": expert.layout, "limit": expert.limit}
    details |= {"offset": expert.offset, "num_experts": len(experts), "weigh_inputs": loop.weigh_inputs}
    return Match(
        ModuleListExpertsFuser.name,
        nodes,
        tuple(weights.experts),
        ("experts",),
        rewrite,
        weights.attributes,
        weights.merged,
        weights.sharding,
        details,
    )


def _alike(
    experts: nn.ModuleList, calls: list[fx.Node], trace: Trace, model: ModelTrace, source: MethodSource
) -> FeedForward:
    """What each of the experts computes.

    Raises:
        RewriteRefused: they are not all alike, or something else than feed-forwards.
    """
    where = source.where(calls[0].meta.get("position"))
    if any(has_hooks(part) or "forward" in vars(part) for part in experts.modules()):
        raise RewriteRefused(f"its experts have hooks or forwards of their own ({where})")
    kinds = structure_of(experts)
    if len({kinds[id(expert)] for expert in experts}) > 1:
        raise RewriteRefused(f"its experts are of several kinds ({where})")
    given = [value_of(call.args[0]) if len(call.args) == 1 and not call.kwargs else None for call in calls]
    inner = child_trace(trace, str(calls[0].target), model)
    expert = None if inner is None else feed_forward_of(inner, model)
    name = type(experts[0]).__name__
    if expert is None or not can_join((*expert.up, expert.down)):
        raise RewriteRefused(f"{name} is no feed-forward of linear layers ({where})")
    if any(not isinstance(facts, TensorFacts) or facts.shape[-1] != expert.down.out_features for facts in given):
        raise RewriteRefused(f"{name} is given more than tokens ({where})")
    if not computes(calls[0].meta["module"], expert):
        raise RewriteRefused(f"{name} computes something else ({where})")
    return expert


def _loop(
    name: str, calls: list[fx.Node], trace: Trace, model: ModelTrace, source: MethodSource, expert: FeedForward
) -> tuple[Region, Loop]:
    """The part of the forward that runs the experts, and what it makes of them.

    Raises:
        RewriteRefused: it makes something else, or does more.
    """
    owner = caller(trace, model)
    position = calls[0].meta.get("position")
    if position is None or any(call.meta.get("position") != position for call in calls):
        raise RewriteRefused(f"its experts are called in several places ({source.where(position)})")
    trial = LoopTrial(trace, owner, source, name, expert.down.out_features)
    survey = Survey(source, owner, settled_of(owner, model.root))
    least = core(source, position, is_elsewhere=bool(calls[0].meta.get("helpers")))
    # It is a part of every region: where it does more, nothing of it is tried.
    survey.numbers(least)
    for region in regions(source, least):
        loop = trial.looks_like(region)
        if loop is None:
            continue
        proved = trial.proved(
            region, loop, survey.numbers(region), are_chosen=_are_chosen(model, len(owner.get_submodule(name)._modules))
        )
        if proved is not None:
            return region, proved
    raise RewriteRefused(f"{type(owner).__name__} runs its experts in a way of its own ({source.where(position)})")


def _are_chosen(model: ModelTrace, num_experts: int) -> bool:
    """Whether the model chooses the best of as many as there are experts: different ones, and none beyond."""
    for trace, _ in model.kinds():
        for node in trace.graph.nodes:
            facts = value_of(node.args[0]) if op(node) in ("topk", "max", "sort", "argsort") and node.args else None
            if isinstance(facts, TensorFacts) and facts.shape[-1:] == (num_experts,):
                return True
    return False


class _Weights:
    """The weights of all experts, joined in the order of their rows.

    Args:
        owner: has the list.
        name: of the list.
        expert: what each is.
    """

    def __init__(self, owner: nn.Module, name: str, expert: FeedForward) -> None:
        self._owner, self._expert = owner, expert
        self.experts = [f"{name}.{index}".lstrip(".") for index in owner.get_submodule(name)._modules]
        self._prefix = name.replace(".", "_") or "experts"
        self.attributes: dict[str, MergedParameter] = {}
        self._texts = [self._of(linears) for linears in (expert.up, (expert.down,))]

    def _of(self, linears: tuple[Linear, ...]) -> str:
        """Weights and biases of some layers of each expert, for source code."""
        children = [f"{expert}.{linear.name}" for expert in self.experts for linear in linears]
        rows = sum(linear.out_features for linear in linears)
        stem = f"{self._prefix}_{joined_name([linear.name for linear in linears])}"
        sizes = {
            "weight": f"{len(self.experts)}, {rows}, {linears[0].in_features}",
            "bias": f"{len(self.experts)}, {rows}",
        }
        texts = []
        for parameter, shape in sizes.items():
            if all(getattr(linear, parameter) is None for linear in linears):
                texts.append("None")
                continue
            name = f"{stem}_{parameter}"
            while hasattr(self._owner, name):
                name += "s"
            self.attributes[name] = MergedParameter(children, parameter)
            texts.append(f"self.{name}.view({shape})")
        return ", ".join(texts)

    @property
    def arguments(self) -> str:
        """What the op is given, for source code."""
        return ", ".join(self._texts)

    @property
    def merged(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that share storage."""
        return tuple(tuple(f"{child}.{p.parameter}" for child in p.children) for p in self.attributes.values())

    @property
    def sharding(self) -> dict[str, str]:
        """How each expert's layers would be cut."""
        styles = {linear.name: "column" for linear in self._expert.up} | {self._expert.down.name: "row"}
        return {f"{expert}.{name}": style for expert in self.experts for name, style in styles.items()}


def _call(loop: Loop, expert: FeedForward, weights: _Weights, owner: nn.Module) -> str:
    x = loop.x if loop.num_dimensions == 2 else f"{loop.x}.reshape(-1, {expert.down.out_features})"
    options = expert.options | ({"weigh_inputs": True} if loop.weigh_inputs else {})
    given = [x, loop.indices, loop.weights, weights.arguments, repr(expert.activation)]
    given += [f"{name}={value!r}" for name, value in options.items()]
    detached = ".detach()" if loop.is_detached else ""
    return f"torch.ops.transfuse.experts({', '.join(given)}){detached}{loop.view or ''}"
