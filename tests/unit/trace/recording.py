"""Records small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from transfuse.trace.graph import ModelTrace, Trace
from transfuse.trace.recorder import record


def trace_of(module: nn.Module, *args: Any, **kwargs: Any) -> ModelTrace:
    module = module.to("meta")
    return record(module, lambda _: module(*args, **kwargs))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def made_by(function: Callable[..., Any]) -> nn.Module:
    """A module whose forward is `function`."""

    class Made(nn.Module):
        forward = function

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))
            self.child = nn.Linear(4, 4)
            self.register_buffer("table", torch.empty(4))

    return Made()


def steps(trace: Trace) -> list[str]:
    """What was recorded, on one line for each node, inputs and output left out."""
    return [
        f"{getattr(node.target, '__name__', node.target)}"
        for node in trace.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def run(function: Callable[..., Any], *args: Any) -> Trace:
    result = trace_of(made_by(function), *(args or (meta(2, 4),)))
    assert result.error is None
    return result.traces[""]


def nodes(trace: Trace, name: str) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if name in (node.target, getattr(node.target, "__name__", None))]
