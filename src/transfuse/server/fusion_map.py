"""`/fusion`: what is fused in which layer of the model, and why the rest is not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from transfuse.fusion.plan import FusionPlan, KindPlan, Status
from transfuse.inspect.layer_map import CellStatus, layer_map
from transfuse.inspect.plan_lines import fusion_line, reasons
from transfuse.server.errors import ErrorBody
from transfuse.server.generation import Service


class FusionCell(BaseModel):
    """One pattern in one layer: whether it was applied, with a line for each place."""

    status: CellStatus
    notes: list[str]


class FusionLayer(BaseModel):
    """One decoder layer, with a cell for each pattern."""

    name: str
    cells: list[FusionCell]


class FusionKind(BaseModel):
    """One kind of module: how many of them there are, what was fused in each, and what was left alone and why."""

    module_class: str
    count: int
    status: Status
    fused: list[str]
    left: list[str]


class FusionMap(BaseModel):
    """What became of the model.

    Attributes:
        implementation: that runs.
        implementation_reason: why that one.
        model_class: name of the model's class; None where nothing was analysed.
        error: why the analysis broke off, or None.
        num_linears: calls of plain linear layers, over all modules.
        num_fused_linears: of those, the ones that run in a fused op.
        patterns: names of the cells of each layer.
        layers: the decoder layers.
        kinds: of modules in which a pattern was found, also outside of the layers.
    """

    implementation: str
    implementation_reason: str
    model_class: str | None = None
    error: str | None = None
    num_linears: int = 0
    num_fused_linears: int = 0
    patterns: list[str] = []
    layers: list[FusionLayer] = []
    kinds: list[FusionKind] = []


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["model"], responses={"default": {"model": ErrorBody, "description": "What was wrong."}})

    @routes.get("/fusion")
    async def read_fusion() -> FusionMap:
        """What is fused in which layer of the model, and why the rest is not."""
        summary, plan = service.llm.summary, service.llm.fusion_plan
        found = FusionMap(implementation=summary["implementation"], implementation_reason=summary["reason"])
        return found if plan is None else found.model_copy(update=_contents(plan))

    return routes


def _contents(plan: FusionPlan) -> dict[str, Any]:
    table = layer_map(plan)
    return {
        "model_class": plan.model_class,
        "error": plan.error,
        "num_linears": plan.num_linears,
        "num_fused_linears": plan.num_fused_linears,
        "patterns": list(table.patterns),
        "layers": [
            FusionLayer(name=name, cells=[FusionCell(status=cell.status, notes=list(cell.notes)) for cell in cells])
            for name, cells in table.rows
        ],
        "kinds": [_kind(kind) for kind in plan.kinds if kind.fusions or kind.kept],
    }


def _kind(kind: KindPlan) -> FusionKind:
    return FusionKind(
        module_class=kind.module_class,
        count=len(kind.paths),
        status=kind.status,
        fused=list(map(fusion_line, kind.fusions)),
        left=[f"{fuser}: {reason}" for fuser, reason in reasons(kind)],
    )
