"""What was found in a model, kind by kind of its modules, and the classes that these become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from transfuse.fusion.plan import FusionPlan, Kept, KindPlan


@dataclass
class FusedKind:
    """One kind of module, with the class that its modules become.

    Attributes:
        plan: what was done.
        fused_class: with the rewritten forward; None where nothing was fused.
        merged: names of parameters that share storage, within a module of the kind.
        called: linear layers that its forward still calls as modules.
    """

    plan: KindPlan
    fused_class: type[nn.Module] | None = None
    merged: tuple[tuple[str, ...], ...] = ()
    called: tuple[str, ...] = ()

    def refused(self, reason: str) -> FusedKind:
        """The same kind of module with its class left as it is."""
        plan = self.plan
        kept = (*plan.kept, *(Kept(fusion.fuser, reason) for fusion in plan.fusions))
        return FusedKind(replace(plan, status="refused", fusions=(), kept=kept, source=None, original=None))

    def parted(self, refused: Mapping[str, str]) -> Iterator[FusedKind]:
        """The same with some of its modules left as they are, by path, each for a reason."""
        reasons = [] if self.fused_class is None else [refused.get(path) for path in self.plan.paths]
        if not any(reasons):
            yield self
            return
        for reason in dict.fromkeys(reasons):
            paths = tuple(path for path, own in zip(self.plan.paths, reasons, strict=True) if own == reason)
            part = replace(self, plan=replace(self.plan, paths=paths))
            yield part if reason is None else part.refused(reason)


@dataclass
class Analysis:
    """What can be done to a model, before it is.

    Attributes:
        plan: of the whole model.
        kinds: of its modules.
    """

    plan: FusionPlan
    kinds: list[FusedKind] = field(default_factory=list)

    def without(self, refused: Mapping[str, str]) -> Analysis:
        """The same, with modules of some classes left as they are.

        Args:
            refused: why, by the name of the class.
        """
        kinds = [
            kind.refused(refused[kind.plan.module_class])
            if kind.fused_class is not None and kind.plan.module_class in refused
            else kind
            for kind in self.kinds
        ]
        return self._of(kinds)

    def without_modules(self, refused: Mapping[str, str]) -> Analysis:
        """The same, with some modules left as they are.

        Args:
            refused: why, by path.
        """
        return self._of([part for kind in self.kinds for part in kind.parted(refused)])

    def _of(self, kinds: list[FusedKind]) -> Analysis:
        return Analysis(replace(self.plan, kinds=tuple(kind.plan for kind in kinds)), kinds)


def install(module: nn.Module, analysis: Analysis) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Have a module's parts take on their fused classes.

    Returns:
        Each part with the class that it had, for `uninstall`.
    """
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    for kind in analysis.kinds:
        if kind.fused_class is None:
            continue
        for path in kind.plan.paths:
            part = module.get_submodule(path)
            before.append((part, type(part)))
            part.__class__ = kind.fused_class
    return before


def uninstall(before: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give parts back the classes that they had."""
    for part, cls in before:
        part.__class__ = cls
