"""What was fused in a model and what was not, and why: data that can be printed, kept and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

PLAN_VERSION = 1
# Of the linear layers in its decoder layers, what has to run in fused ops for a model to count as fused.
LEAST_SHARE = 0.9

# Patterns whose children are linear layers.
LINEAR_FUSERS = frozenset({"qkv", "packed_qkv", "mla", "glu", "mlp", "linear"})

Status = Literal["fused", "partial", "kept", "refused"]


@dataclass(frozen=True)
class Fusion:
    """One pattern that was applied.

    Attributes:
        fuser: name of the pattern.
        children: modules that are no longer called.
        kernels: ops that run instead.
        merged: parameters that share storage, group by group.
        sharding: how each child's weights would be cut over several devices.
        details: what the pattern computes: settings by name.
    """

    fuser: str
    children: tuple[str, ...]
    kernels: tuple[str, ...]
    merged: tuple[tuple[str, ...], ...] = ()
    sharding: dict[str, str] = field(default_factory=dict)
    details: dict[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """One pattern that was found and left alone.

    Attributes:
        fuser: name of the pattern.
        reason: what stood in the way.
        line: of the source, or None.
    """

    fuser: str
    reason: str
    line: int | None = None


@dataclass(frozen=True)
class KindPlan:
    """What was done to one kind of module.

    Attributes:
        module_class: name of the class.
        file: of its forward.
        line: where its forward starts.
        paths: of the modules of this kind.
        status: `fused` (all its patterns), `partial` (some), `refused` (none of those found), `kept` (none found).
        fusions: what was applied.
        kept: what was left alone.
        source: of the rewritten forward, or None.
        original: source of the forward before, or None where none was rewritten.
        num_linears: plain linear layers that a module of this kind calls.
    """

    module_class: str
    file: str
    line: int
    paths: tuple[str, ...]
    status: Status
    fusions: tuple[Fusion, ...] = ()
    kept: tuple[Kept, ...] = ()
    source: str | None = None
    original: str | None = None
    num_linears: int = 0

    @property
    def num_fused_linears(self) -> int:
        """Of those, the ones that run in a fused op."""
        return sum(len(fusion.children) for fusion in self.fusions if fusion.fuser in LINEAR_FUSERS)


@dataclass(frozen=True)
class FusionPlan:
    """What was done to a model.

    Attributes:
        model_class: name of the class.
        kinds: of its modules, in the order in which they first ran.
        error: why the analysis broke off, or None.
        layers: path of the list of its decoder layers; "" where it has none.
        key: digest of all that the plan depends on: sources, config and versions; "" where that is not known.
        version: of this format.
    """

    model_class: str
    kinds: tuple[KindPlan, ...]
    error: str | None = None
    layers: str = ""
    key: str = ""
    version: int = PLAN_VERSION

    @property
    def num_linears(self) -> int:
        """Calls of plain linear layers, over all modules."""
        return sum(kind.num_linears * len(kind.paths) for kind in self.kinds)

    @property
    def num_fused_linears(self) -> int:
        """Of those, the ones that run in a fused op."""
        return sum(kind.num_fused_linears * len(kind.paths) for kind in self.kinds)

    @property
    def num_fusions(self) -> int:
        """Patterns that were applied, over all modules."""
        return sum(len(kind.fusions) * len(kind.paths) for kind in self.kinds)

    @property
    def counts_as_fused(self) -> bool:
        """Whether the model as a whole counts as fused; `shortfall` says why not."""
        return self.shortfall is None

    @property
    def shortfall(self) -> str | None:
        """What is missing for the model to count as fused, or None.

        At least nine tenths of its decoder layers' linear layers have to run in fused ops, and a residual and the norm
        of its sum have to be one op wherever a layer has both. Of a forward that could not be recorded to its end
        nobody knows what it holds.
        """
        if self.error is not None:
            return f"its forward could not be recorded to its end: {self.error}"
        layers = list(self._in_layers())
        total = sum(kind.num_linears * count for kind, count in layers)
        fused = sum(kind.num_fused_linears * count for kind, count in layers)
        if not total:
            return "its decoder layers hold no plain linear layers"
        if fused < LEAST_SHARE * total:
            return f"{fused} of {total} linears of the decoder layers run in fused ops{self._first_reason()}"
        for kind, _ in layers:
            for kept in kind.kept:
                if kept.fuser == "residual_norm":
                    return f"residual and norm of {kind.module_class} stay apart: {kept.reason}"
        return None

    def _in_layers(self) -> Iterator[tuple[KindPlan, int]]:
        """Kinds that occur in the decoder layers, and how often."""
        for kind in self.kinds:
            count = sum(path.startswith(f"{self.layers}.") for path in kind.paths) if self.layers else 0
            if count:
                yield kind, count

    def _first_reason(self) -> str:
        """Why linear layers were left alone, by the first that were."""
        for kind, _ in self._in_layers():
            if kind.num_fused_linears < kind.num_linears and kind.kept:
                return f" ({kind.module_class}: {kind.kept[-1].reason})"
        return ""

    def to_json(self) -> bytes:
        """The plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> FusionPlan:
        """A plan that `to_json` wrote.

        Raises:
            ValueError: it is damaged, or of another version of the format.
        """
        plan = msgspec.json.decode(text, type=cls)
        if plan.version != PLAN_VERSION:
            raise ValueError(f"the plan has version {plan.version} of its format; this is version {PLAN_VERSION}")
        return plan
