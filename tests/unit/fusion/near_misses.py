"""Layers that are nearly what patterns look for, and compute something else or may do so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.unit.fusion.custom_models import SIZE, InlineGlu, OffsetNorm


class MeanOverTokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


class SquareOfAnother(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)


class EpsOutside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)


class SumInsteadOfMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class NormByLength(nn.Module):
    """Another weight for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if x.shape[1] > 5:
            return x * self.long
        return x * self.short


class RememberingNorm(OffsetNorm):
    """Keeps what it saw."""

    last: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = inputs
        return inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-5) * self.g


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)


class Rebound(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.wq(x)
        x = x + 1
        return q * self.wk(x)


class ReboundSometimes(TwoLinears):
    def forward(self, x: torch.Tensor, shift: bool = False) -> torch.Tensor:
        q = self.wq(x)
        if shift:
            x = x + 1
        return q * self.wk(x)


class ChangedInPlace(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        q = self.wq(x)
        x.mul_(2)
        return q * self.wk(x)


class CalledTwice(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wq(x) * self.wk(x) + self.wq(x + 1)


class GateUsedTwice(InlineGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.w1(x))
        return self.w2(gate * self.w3(x)) + gate.mean()


class GateUsedInAnotherBranch(InlineGlu):
    def forward(self, x: torch.Tensor, bare: bool = False) -> torch.Tensor:
        gate = self.w1(x)
        if bare:
            return self.w2(gate)
        return self.w2(functional.silu(gate) * self.w3(x))


class OtherInputs(InlineGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x + 1))


class BothActivated(InlineGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * functional.silu(self.w3(x)))


class UnevenClamp(InlineGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x).clamp(max=0.1)) * self.w3(x).clamp(-0.2, 0.2))


class DropoutBetween(InlineGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.dropout(functional.silu(self.w1(x)), 0.5, self.training) * self.w3(x))


class SumChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OffsetNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + x.flip(1)
        total.mul_(2)
        return self.norm(total) + total


class Broadcast(nn.Module):
    """A bias for every token, not a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = OffsetNorm(), nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.shift)


class HalfTurn(nn.Module):
    """Not a rotation: both halves take the same sign."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self.wq(x).view(2, -1, 4, 8).transpose(1, 2)
        return unturned(q, cos, sin)


def unturned(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = q.chunk(2, dim=-1)
    return q * cos - torch.cat((second, first), dim=-1) * sin
