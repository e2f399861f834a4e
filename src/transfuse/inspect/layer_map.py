"""What became of each pattern in each decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transfuse.fusion.plan import FusionPlan, KindPlan
from transfuse.inspect.plan_lines import consumed_by, fusion_line, reasons

CellStatus = Literal["fused", "partial", "refused", "none"]


@dataclass(frozen=True)
class Cell:
    """One pattern in one layer.

    Attributes:
        status: `fused` where it was applied wherever it was found, `partial` where not everywhere, `refused` nowhere,
            `none` where it was not found.
        notes: a line for each place.
    """

    status: CellStatus
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerMap:
    """A table.

    Attributes:
        patterns: names of the columns.
        rows: name of each layer with its cells.
    """

    patterns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def layer_map(plan: FusionPlan) -> LayerMap:
    """The table of a plan; layers that have no modules of their own are not in it, and without layers it is empty."""
    by_layer: dict[str, list[tuple[str, KindPlan]]] = {}
    consumed = consumed_by(plan)
    for kind in plan.kinds:
        for path in kind.paths:
            if path not in consumed and (layer := _layer_of(path, plan.layers)) is not None:
                by_layer.setdefault(layer, []).append((path, kind))
    kinds = [kind for modules in by_layer.values() for _, kind in modules]
    applied = [fusion.fuser for kind in kinds for fusion in kind.fusions]
    left = [kept.fuser for kind in kinds for kept in kind.kept]
    patterns = tuple(dict.fromkeys([*applied, *left]))
    rows = tuple(
        (layer, tuple(_cell(pattern, modules) for pattern in patterns))
        for layer, modules in sorted(by_layer.items(), key=lambda item: _number(item[0]))
    )
    return LayerMap(patterns, rows)


def _layer_of(path: str, layers: str) -> str | None:
    prefix = f"{layers}."
    if not layers or not path.startswith(prefix):
        return None
    return prefix + path.removeprefix(prefix).partition(".")[0]


def _number(layer: str) -> int:
    last = layer.rpartition(".")[2]
    return int(last) if last.isdigit() else 0


def _cell(pattern: str, modules: list[tuple[str, KindPlan]]) -> Cell:
    applied, left = list(_applied(pattern, modules)), list(_left(pattern, modules))
    if not applied and not left:
        return Cell("none")
    status: CellStatus = "refused" if not applied else "partial" if left else "fused"
    return Cell(status, (*applied, *left))


def _applied(pattern: str, modules: list[tuple[str, KindPlan]]) -> Iterator[str]:
    for path, kind in modules:
        yield from (f"{path}: {fusion_line(fusion)}" for fusion in kind.fusions if fusion.fuser == pattern)


def _left(pattern: str, modules: list[tuple[str, KindPlan]]) -> Iterator[str]:
    for path, kind in modules:
        yield from (f"{path}: {reason}" for fuser, reason in reasons(kind) if fuser == pattern)
