"""What tests of patterns have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from transfuse import fuse, unfuse
from transfuse.fusion.plan import Fusion, FusionPlan

Fused = Callable[..., FusionPlan]


@pytest.fixture
def fused_alike(one_thread: None) -> Fused:
    """Fuses a module and checks that its results and gradients stay the same."""
    return _fused_alike


def _fused_alike(module: nn.Module, *inputs: torch.Tensor, tolerance: float = 2e-5, train: bool = True) -> FusionPlan:
    randomise(module)
    before = _results(module, inputs, train)
    plan = fuse(module, inputs)
    try:
        for found, expected in zip(_results(module, inputs, train), before, strict=True):
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    finally:
        unfuse(module)
    return plan


def _results(module: nn.Module, inputs: tuple[torch.Tensor, ...], train: bool) -> list[torch.Tensor]:
    torch.manual_seed(7)
    for parameter in module.parameters():
        parameter.grad = None
    with torch.set_grad_enabled(train):
        result = module(*inputs)
    results = list(result) if isinstance(result, tuple) else [result]
    if train and results[0].requires_grad:
        sum(r.square().sum() for r in results if r.is_floating_point()).backward()  # type: ignore[union-attr]
    # Where no gradient arrives there is none, or one of zeros: for experts that nothing was given to.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return [*(r.detach().clone() for r in results), *(gradient.clone() for gradient in gradients)]


def randomise(module: nn.Module) -> None:
    """Numbers of which none is trivial: no bias of zero, no norm weight of one."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def fusions(plan: FusionPlan) -> list[Fusion]:
    """All that was applied, over all modules."""
    return [fusion for kind in plan.kinds for fusion in kind.fusions for _ in kind.paths]


def names(plan: FusionPlan) -> list[str]:
    """Patterns that were applied, in alphabetical order."""
    return sorted(fusion.fuser for fusion in fusions(plan))


def reasons(plan: FusionPlan) -> str:
    """Why others were not."""
    return "; ".join(f"{kept.fuser}: {kept.reason}" for kind in plan.kinds for kept in kind.kept)


def hidden(length: int = 5, size: int = 32, **options: Any) -> torch.Tensor:
    """Some tokens."""
    return torch.randn(2, length, size, generator=torch.Generator().manual_seed(1), **options)
