"""Mixtures of experts in spellings of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.unit.fusion.custom_models import SIZE, InlineGlu

EXPERTS, TOP = 8, 2


class Mixture(nn.Module):
    """Routing in the layer itself, and experts in a list; one class for each way to route."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False)
        self.experts = nn.ModuleList(InlineGlu() for _ in range(EXPERTS))
        self.correction = nn.Parameter(torch.zeros(EXPERTS))

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


class SoftmaxMixture(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        weights = functional.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, TOP, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        return self.mix(x, weights, chosen)


class LateSigmoidMixture(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        chosen = (logits + self.correction).topk(TOP, dim=-1).indices
        weights = logits.gather(1, chosen).sigmoid() * 1.5
        return self.mix(x, weights, chosen)


class GroupedMixture(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        scores = logits.sigmoid()
        choice = scores + self.correction
        groups = choice.view(-1, 4, EXPERTS // 4).topk(2, dim=-1)[0].sum(dim=-1)
        best = torch.topk(groups, k=2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(groups)
        mask.scatter_(1, best, 1)
        inside = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
        choice = choice.masked_fill(~inside.bool(), float("-inf"))
        chosen = torch.topk(choice, k=TOP, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return self.mix(x, weights * 2.5, chosen)


class SoftplusMixture(Mixture):
    """Scores that the op does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        weights, chosen = torch.topk(functional.softplus(logits), TOP, dim=-1)
        return self.mix(x, weights, chosen)


class ObservedMixture(Mixture):
    """Whose scores something else needs too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        scores = logits.softmax(-1)
        weights, chosen = torch.topk(scores, TOP, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.mix(x, weights, chosen), scores.mean(0)


class CountingMixture(Mixture):
    """That counts how often it ran among its own statements."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, SIZE)
        logits = self.gate(x)
        scores = logits.softmax(-1)
        self.calls += 1
        weights, chosen = torch.topk(scores, TOP, dim=-1)
        return self.mix(x, weights, chosen)
