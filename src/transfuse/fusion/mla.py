"""Multi-head latent attention: keys and values that one linear layer makes of latents, so that these can be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from transfuse.fusion.attention import given_to, is_attention, is_update
from transfuse.fusion.evaluate import Evaluator, NotEvaluable
from transfuse.fusion.fuser import Fuser, Match, Refusal, child_trace
from transfuse.fusion.linears import Linear, caller, linear_of, owner_of
from transfuse.fusion.mla_rewrite import Expansion, attend_to_latents
from transfuse.fusion.query import between, op, unmoved
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

_DIMENSIONS = 4


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an expansion.

    Attributes:
        num_heads: of keys, values and queries.
        rank: of a latent.
        own_dim: of a head's key, what is made of the latent.
        shared_dim: of a head's key, what all heads share.
        value_head_dim: of a head's value.
    """

    num_heads: int
    rank: int
    own_dim: int
    shared_dim: int
    value_head_dim: int


class LatentAttentionFuser(Fuser):
    """Attention whose keys and values are made of what a cache was given, or may be given in their place.

    What they are made of is found by following them back to one linear layer that both go through; that they are made
    so and in no other way is found by computing them.
    """

    name = "mla"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            expansion = _expansion(node, trace, model) if is_attention(node) else None
            if expansion is None:
                continue
            found = _sizes(expansion, trace, model)
            if isinstance(found, str):
                yield Refusal(self.name, found, node.meta.get("position"))
            else:
                yield self._match(expansion, found, trace, model)

    def _match(self, expansion: Expansion, sizes: _Sizes, trace: Trace, model: ModelTrace) -> Match:
        linear, owner = expansion.linear, caller(trace, model)
        weight = f"{owner_of(owner, linear.name)}.{linear.weight}"
        return Match(
            self.name,
            frozenset(expansion.nodes),
            (linear.name,),
            ("latent_attention",),
            lambda edits: attend_to_latents(edits, expansion, weight, owner),
            sharding={linear.name: "column"},
            details={name: getattr(sizes, name) for name in _Sizes.__dataclass_fields__},
        )


def _expansion(attention: fx.Node, trace: Trace, model: ModelTrace) -> Expansion | None:
    """How an attention's keys and values are made, if that may be from latents; None where it is not."""
    given = given_to(attention)
    results: list[Any] = [given.get("key"), given.get("value")]
    if not all(_is_heads(result) for result in results):
        return None
    nodes = list(trace.graph.nodes)
    before = nodes[: nodes.index(attention)]
    for update in before:
        if not is_update(update):
            continue
        parts = _parts(update)
        if results == parts:
            return _before_update(attention, update, before, trace, model)
        if all(_is_heads(part) for part in parts):
            region = _behind(results, parts, before)
            linear = _shared_linear(region, results, parts, trace, model)
            if linear is not None:
                return Expansion(attention, update, linear, parts[0], parts[1], results[0], results[1], region)
    return None


def _parts(update: fx.Node) -> list[Any]:
    """The keys and values that an update of the cache returns."""
    by_index = {user.args[1]: user for user in update.users if op(user) == "getitem"}
    return [by_index.get(0), by_index.get(1)]


def _before_update(
    attention: fx.Node, update: fx.Node, before: Sequence[fx.Node], trace: Trace, model: ModelTrace
) -> Expansion | None:
    """An expansion of what is then given to the cache, which could be given the latents instead."""
    results: list[Any] = list(update.args[:2])
    if not all(isinstance(result, fx.Node) for result in results) or len(results) < 2:
        return None
    earlier = before[: before.index(update)]
    common = between(results[1])
    linears = [found for node in earlier if node in common and (found := linear_of(node, trace, model))]
    linear = linears[-1] if linears else None
    if linear is None or linear.node not in _behind(results[:1], [], earlier):
        return None
    own = between(linear.node)
    keys, values = (value_of(part).shape for part in _parts(update))
    dim = keys[-1] - (linear.out_features // keys[1] - values[-1])
    for shared in _shared_parts(results[0], (keys[2], dim), linear, own, earlier):
        region = _behind(results, [linear.source, shared], earlier)
        if _shared_linear(region, results, [linear.source, shared], trace, model) is not None:
            return Expansion(attention, update, linear, linear.source, shared, results[0], results[1], region)
    return None


def _shared_parts(
    keys: fx.Node, shape: tuple[int, int], linear: Linear, own: set[fx.Node], earlier: Sequence[fx.Node]
) -> Iterator[fx.Node]:
    """What may be the part of the keys that all heads share, what is computed last before what comes first."""
    behind = _behind([keys], [linear.node], earlier)
    for node in reversed(earlier):
        facts = value_of(node)
        is_single = isinstance(facts, TensorFacts) and facts.shape in ((1, 1, *shape), (1, *shape))
        if is_single and node in behind and node not in own and linear.node not in between(node):
            yield node


def _is_heads(node: Any) -> bool:
    facts = value_of(node)
    return isinstance(facts, TensorFacts) and len(facts.shape) == _DIMENSIONS and facts.shape[0] == 1


def _behind(results: Sequence[Any], sources: Sequence[Any], before: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that `results` are computed by, back to `sources`; those that write into such nodes are among them."""
    found: set[fx.Node] = set().union(*(between(result, *sources) for result in results))
    while True:
        writing = [n for n in before if n.meta.get("mutates") and n not in found and unmoved(n.args[0]) in found]
        if not writing:
            return found
        found = found.union(*(between(node, *sources) for node in writing))


def _shared_linear(
    region: set[fx.Node], results: Sequence[Any], sources: Sequence[Any], trace: Trace, model: ModelTrace
) -> Linear | None:
    """The linear layer of `sources[0]` that both keys and values go through, if there is just one."""
    common = region & between(results[1], *sources)
    linears = [linear for node in common if (linear := linear_of(node, trace, model)) is not None]
    if len(linears) != 1 or unmoved(linears[0].source) not in (sources[0], unmoved(sources[0])):
        return None
    return linears[0] if linears[0].node in _behind(results[:1], sources, list(trace.graph.nodes)) else None


def _sizes(expansion: Expansion, trace: Trace, model: ModelTrace) -> _Sizes | str:
    """Sizes of what was found, if it is what the op computes; else what is different."""
    linear, given = expansion.linear, given_to(expansion.attention)
    keys, values = value_of(given["key"]).shape, value_of(given["value"]).shape
    queries = value_of(given.get("query"))
    if linear.bias is not None or linear.is_transposed:
        return f"{linear.name} has a bias or a weight that is kept transposed"
    if not _is_heads(given.get("query")) or queries.shape[1] != keys[1] or values[1] != keys[1]:
        return "queries, keys and values have different numbers of heads"
    if given.get("s_aux") is not None or given.get("sinks") is not None:
        return "attention over latents has no sinks"
    other = next((node for node in expansion.nodes if _is_needed_besides(node, expansion)), None)
    if other is not None:
        return f"what keys and values are made by is needed besides ({other})"
    sizes = _Sizes(
        num_heads=keys[1],
        rank=linear.in_features,
        own_dim=linear.out_features // keys[1] - values[3],
        shared_dim=keys[3] - (linear.out_features // keys[1] - values[3]),
        value_head_dim=values[3],
    )
    if min(sizes.own_dim, sizes.shared_dim) < 1 or linear.out_features % keys[1]:
        return "keys have no part that all heads share"
    try:
        is_same = _gives(expansion, sizes, trace, model)
    except NotEvaluable as error:
        return f"it cannot be tried: {error}"
    return sizes if is_same else "keys and values are made of latents in a way of their own"


def _is_needed_besides(node: fx.Node, expansion: Expansion) -> bool:
    """Whether something else than the attention's keys and values is computed by a node."""
    ends = (expansion.attention, expansion.update) if node in (expansion.keys, expansion.values) else ()
    others = [user for user in node.users if user not in expansion.nodes and user not in ends]
    return bool(others) and node.op not in ("get_attr", "placeholder")


def _gives(expansion: Expansion, sizes: _Sizes, trace: Trace, model: ModelTrace) -> bool:
    """Whether the forward makes the keys and values that the op takes it to make, by computing both."""
    evaluator = Evaluator(model)
    latent, shared = (evaluator.random(value_of(node)) for node in (expansion.latent, expansion.shared))
    writing = [node for node in trace.graph.nodes if node in expansion.nodes and node.meta.get("mutates")]
    given = {expansion.latent: latent.clone(), expansion.shared: shared.clone()}
    *_, keys, values = evaluator.run(trace, [*writing, expansion.keys, expansion.values], given)
    inner = child_trace(trace, expansion.linear.name, model)
    weight = evaluator.parameters.pop(f"{inner.path}.{expansion.linear.weight}", None) if inner else None
    is_kept = (
        not _is_written(expansion, trace)
        and torch.equal(given[expansion.latent], latent)
        and torch.equal(given[expansion.shared], shared)
    )
    if weight is None or evaluator.parameters or not is_kept:
        return False
    num_tokens = keys.shape[2]
    if latent.numel() != num_tokens * sizes.rank or shared.numel() != num_tokens * sizes.shared_dim:
        return False
    made = (latent.reshape(num_tokens, -1) @ weight.T).view(num_tokens, sizes.num_heads, -1).transpose(0, 1)
    own, expected = made[..., : sizes.own_dim], made[..., sizes.own_dim :]
    expected_keys = torch.cat((own, shared.reshape(1, num_tokens, -1).expand(sizes.num_heads, -1, -1)), dim=-1)
    return _alike(keys[0], expected_keys) and _alike(values[0], expected)


def _is_written(expansion: Expansion, trace: Trace) -> bool:
    """Whether something may write into latents once they are there."""
    nodes = list(trace.graph.nodes)
    origins = (unmoved(expansion.latent), unmoved(expansion.shared))
    start = max(map(nodes.index, (expansion.latent, expansion.shared)))
    later = nodes[start : nodes.index(expansion.attention)]
    return any(node.meta.get("mutates") and unmoved(node.args[0]) in origins for node in later)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
