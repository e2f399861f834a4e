"""The modules of a model as a tree, in which siblings that are alike are one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from transfuse.fusion.plan import Fusion, FusionPlan, KindPlan
from transfuse.inspect.costs import Cost, ModelCosts
from transfuse.inspect.plan_lines import consumed_by, fusion_line, reasons
from transfuse.inspect.units import TIMES


@dataclass(frozen=True)
class TreeNode:
    """A module, or several that are alike.

    Attributes:
        label: its name, or the range of their names.
        path: of the first of them.
        count: how many they are.
        module_class: name of the class.
        kind: what was done to them; None where they did not run by themselves.
        consumed_by: the pattern of the module above that computes what they would; None where they are called.
        sizes: of its parameters, for a layer of `torch.nn`.
        cost: of one of them with everything below it.
        children: in the order of registration.
    """

    label: str
    path: str
    count: int
    module_class: str
    kind: KindPlan | None
    consumed_by: str | None
    sizes: str
    cost: Cost
    children: tuple[TreeNode, ...] = ()

    @property
    def status(self) -> str:
        """`fused`, `partial`, `refused`, `kept`, `consumed` or `not run`."""
        if self.consumed_by is not None:
            return "consumed"
        return "not run" if self.kind is None else self.kind.status

    def walk(self) -> Iterator[TreeNode]:
        """The node and everything below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def fused(self) -> list[tuple[str, Fusion]]:
        """A line for each pattern that was applied, with how often, and one of its applications."""
        fusions = () if self.kind is None else self.kind.fusions
        alike: dict[str, list[Fusion]] = {}
        for fusion in fusions:
            alike.setdefault(fusion_line(fusion), []).append(fusion)
        return [(f"{line} {TIMES}{len(all_)}" if len(all_) > 1 else line, all_[0]) for line, all_ in alike.items()]

    def reasons(self) -> list[tuple[str, str]]:
        """What was left alone, with why and where; a forward that broke off in a module below says so there."""
        if self.kind is None:
            return []
        below = [node.kind for child in self.children for node in child.walk() if node.kind is not None]
        told = {kept.reason for kind in below for kept in kind.kept if kept.fuser == "trace"}
        return [(fuser, reason) for fuser, reason in reasons(self.kind) if fuser != "trace" or reason not in told]


def module_tree(root: nn.Module, plan: FusionPlan, costs: ModelCosts) -> TreeNode:
    """The tree of a model whose forward was analysed."""
    kinds = {path: kind for kind in plan.kinds for path in kind.paths}
    first = {id(module): path for path, module in root.named_modules()}
    return _Builder(kinds, consumed_by(plan), costs, first).node("", type(root).__name__, root)


class _Builder:
    def __init__(
        self,
        kinds: Mapping[str, KindPlan],
        consumed: Mapping[str, str],
        costs: ModelCosts,
        first: Mapping[int, str],
    ) -> None:
        self._kinds, self._consumed, self._costs, self._first = kinds, consumed, costs, first

    def node(self, path: str, name: str, module: nn.Module) -> TreeNode:
        """A module with what is below it."""
        children = [
            self.node(f"{path}.{child}" if path else child, child, part) for child, part in module.named_children()
        ]
        return TreeNode(
            label=name,
            path=path,
            count=1,
            module_class=type(module).__name__,
            # A module that has several paths is recorded under the first.
            kind=self._kinds.get(self._first[id(module)]),
            consumed_by=self._consumed.get(path),
            sizes=_sizes(module) if not children else "",
            cost=sum((child.cost for child in children), self._costs.by_path.get(path, Cost())),
            children=_folded(children),
        )


def _sizes(module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    if weight is None:
        return ""
    shape = list(weight.shape)
    return f"{shape[1]} → {shape[0]}" if isinstance(module, nn.Linear) else f" {TIMES} ".join(map(str, shape))


def _folded(children: Sequence[TreeNode]) -> tuple[TreeNode, ...]:
    """Numbered siblings that are alike as one; others as they are."""
    groups: dict[object, list[TreeNode]] = {}
    for child in children:
        key: object = _likeness(child) if child.label.isdigit() else child.label
        groups.setdefault(key, []).append(child)
    return tuple(
        replace(alike[0], label=_ranges([int(one.label) for one in alike]), count=len(alike))
        if len(alike) > 1
        else alike[0]
        for alike in groups.values()
    )


def _likeness(node: TreeNode, label: str = "") -> object:
    """Equal for nodes of the same kind all the way down; paths do not count."""
    below = tuple(_likeness(child, child.label) for child in node.children)
    return label, node.count, node.module_class, id(node.kind), node.consumed_by, node.sizes, node.cost, below


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5; cut off after a few."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in parts]
    return ", ".join(texts if len(texts) <= _MOST_RANGES else [*texts[: _MOST_RANGES - 1], f"… {texts[-1]}"])


_MOST_RANGES = 6
