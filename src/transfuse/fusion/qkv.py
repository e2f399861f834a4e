"""Linear layers that read the same input (query, key and value first of all): one product instead of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.linears import JoinedLinears, Linear, can_join, linear_of, place, refuse_changes, variable
from transfuse.fusion.query import mutations_between
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, Trace


class SharedInputFuser(Fuser):
    """Hoists the products of linear layers that share their input to the first of them."""

    name = "qkv"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        by_input: dict[fx.Node, list[Linear]] = {}
        for node in trace.graph.nodes:
            linear = linear_of(node, trace, model)
            if linear is not None and can_join([linear]):
                by_input.setdefault(linear.source, []).append(linear)
        for linears in by_input.values():
            nodes = [linear.node for linear in linears]
            if len(nodes) < 2:
                continue
            if len({linear.name for linear in linears}) < len(linears):
                yield Refusal(self.name, f"{nodes[0].target} is called twice", nodes[0].meta.get("position"))
                continue
            changed = mutations_between(trace.graph, nodes[0], nodes[-1])
            if changed:
                yield Refusal(self.name, "a tensor is changed in place between them", changed[0].meta.get("position"))
                continue
            yield self._match(linears, trace)

    def _match(self, linears: Sequence[Linear], trace: Trace) -> Match:
        joined = JoinedLinears(linears)
        nodes = [linear.node for linear in linears]
        # Autograd lets nothing change the parts of a split in place, such as clamp_ does, unless told that the whole is
        # not used any more.
        is_changed = any(node.meta.get("mutates") for node in trace.graph.nodes)
        split = "unsafe_split_with_sizes" if is_changed else "split"

        def rewrite(edits: Edits) -> None:
            first = place(nodes[0])
            names = {variable(edits, node) for node in nodes}
            if len(names) != 1:
                raise RewriteRefused(f"the input of {joined.name} has several names ({edits.source.where(first)})")
            for node in nodes[1:]:
                if not edits.follows(first, place(node)):
                    raise RewriteRefused(f"{node.target} may run without {nodes[0].target}")
            name = names.pop()
            refuse_changes(edits, name, first, place(nodes[-1]))
            results = [edits.fresh(f"{child.replace('.', '_')}_out") for child in joined.children]
            sizes = ", ".join(map(str, joined.sizes))
            edits.insert_before(
                first,
                f"{', '.join(results)} = torch.ops.transfuse.linear({name}, {joined.arguments})"
                f".{split}(({sizes}), dim=-1)",
            )
            for node, result in zip(nodes, results, strict=True):
                edits.replace(place(node), result)

        return Match(
            self.name,
            frozenset(nodes),
            joined.children,
            ("linear",),
            rewrite,
            joined.attributes,
            joined.merged,
            dict.fromkeys(joined.children, "column"),
        )
