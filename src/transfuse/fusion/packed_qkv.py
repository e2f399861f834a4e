"""One linear layer whose rows are several: queries, keys and values in one weight, side by side or interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from transfuse.fusion.evaluate import Evaluator, NotEvaluable
from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.linears import Linear, caller, linear_of, owner_of
from transfuse.fusion.mlp import call_op
from transfuse.fusion.query import MOVES, op, uncast
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of


class PackedQkvFuser(Fuser):
    """A linear layer whose result is divided into parts; the plan says which rows are whose, so that it can be cut."""

    name = "packed_qkv"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            linear = linear_of(node, trace, model)
            layout = None if linear is None else layout_of(linear, trace, model)
            if linear is not None and layout is not None:
                yield self._match(linear, owner_of(caller(trace, model), linear.name), layout)

    def _match(self, linear: Linear, owner: str, layout: dict[str, str | int]) -> Match:
        return Match(
            self.name,
            frozenset({linear.node}),
            (linear.name,),
            ("linear",),
            lambda edits: call_op(edits, linear, owner),
            sharding={linear.name: "column"},
            details=layout,
        )


def layout_of(linear: Linear, trace: Trace, model: ModelTrace) -> dict[str, str | int] | None:
    """Which rows of a weight belong to which part, found by following the numbers of the rows through the forward.

    Returns:
        `sizes`, of the parts within a group of rows, as "64+16+16", and `groups`, how often that repeats: 1 where the
        parts lie side by side. None where the result is not divided, or in another way.
    """
    root = linear.node
    while len(root.users) == 1 and op(next(iter(root.users))) in ("clamp", "clip"):
        root = next(iter(root.users))
    parts = _parts(root)
    if len(parts) < 2:
        return None
    facts = value_of(linear.node)
    numbers = torch.arange(linear.out_features, dtype=torch.float32).expand(facts.shape).contiguous()
    try:
        values = Evaluator(model).run(trace, parts, {root: numbers})
    except NotEvaluable:
        return None
    rows = [torch.unique(value).long().tolist() for value in values if value.numel()]
    if sorted(row for part in rows for row in part) != list(range(linear.out_features)):
        return None
    return _repeating(rows, linear.out_features)


def _parts(node: fx.Node) -> list[fx.Node]:
    """Where the numbers of a node are first computed with, after they were only moved about."""
    found: list[fx.Node] = []
    waiting = [node]
    while waiting:
        current = waiting.pop(0)
        # What a function does with a part, such as turning some of its dimensions, is of no interest.
        users = [user for user in current.users if not user.meta.get("helpers")]
        moved = [user for user in users if op(user) in MOVES or uncast(user) is not user]
        if len(moved) == len(current.users) and moved:
            waiting.extend(moved)
        elif isinstance(value_of(current), TensorFacts) and current.users:
            found.append(current)
    return found


def _repeating(rows: Sequence[list[int]], size: int) -> dict[str, str | int] | None:
    """Sizes of parts that follow one another, once or group by group."""
    order = sorted(range(len(rows)), key=lambda index: rows[index][0])
    whole = [len(part) for part in rows]
    for groups in range(1, size + 1):
        if any(count % groups for count in whole):
            continue
        sizes = [whole[index] // groups for index in order]
        start = 0
        expected: list[list[int]] = []
        for count in sizes:
            period = size // groups
            expected.append([g * period + start + i for g in range(groups) for i in range(count)])
            start += count
        if expected == [rows[index] for index in order]:
            return {"sizes": "+".join(map(str, sizes)), "groups": groups}
    return None
