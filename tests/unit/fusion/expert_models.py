"""Experts that declare no seam, in several spellings, and some that only look like experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.unit.fusion.custom_models import SIZE

EXPERTS, TOP, INNER = 6, 2, 16


class OwnExperts(nn.Module):
    """A loop over the experts that were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.inner = EXPERTS, INNER
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, SIZE))
        self.w2 = nn.Parameter(torch.zeros(EXPERTS, SIZE, INNER))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for index in functional.one_hot(chosen, self.count + 3).sum((0, 1)).nonzero():
            expert = int(index)
            if expert < self.count:
                tokens, places = torch.where(chosen == expert)
                made = self.run(expert, x[tokens]) * weights[tokens, places, None]
                result = result.index_add(0, tokens, made)
        return result

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self.w13[expert]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.w2[expert])


class SwappedExperts(OwnExperts):
    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        up, gate = functional.linear(x, self.w13[expert]).chunk(2, dim=-1)
        return functional.linear(up * functional.gelu(gate), self.w2[expert])


class ClampedExperts(OwnExperts):
    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        both = functional.linear(x, self.w13[expert])
        gate, up = both[:, ::2].clamp(max=0.5), both[:, 1::2].clamp(min=-0.5, max=0.5)
        return functional.linear(gate * torch.sigmoid(gate) * (up + 1), self.w2[expert])


class FlatExperts(OwnExperts):
    """Three matrices whose rows are those of all experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.w13, self.w2
        self.v, self.u, self.o = (nn.Parameter(torch.zeros(EXPERTS * INNER, SIZE)) for _ in range(3))

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (p.view(self.count, INNER, SIZE)[expert] for p in (self.u, self.v, self.o))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down


class TransposedExperts(OwnExperts):
    """Without a gate, and with matrices the other way round."""

    def __init__(self) -> None:
        super().__init__()
        del self.w13, self.w2
        self.first = nn.Parameter(torch.zeros(EXPERTS, SIZE, INNER))
        self.second = nn.Parameter(torch.zeros(EXPERTS, INNER, SIZE))

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x @ self.first[expert]).square() @ self.second[expert]


class IdleExperts(OwnExperts):
    """With more experts than weights: the others hand the tokens on."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        idle = (weights * (chosen >= self.count)).sum(-1, keepdim=True)
        return super_forward(self, x, chosen, weights) + idle * x


def super_forward(module: OwnExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return OwnExperts.forward(module, x, chosen, weights)


class NormedExperts(OwnExperts):
    """That normalise what each gives."""

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(super().run(expert, x), dim=-1)


class LastExpertDiffers(OwnExperts):
    """The last one is twice as strong."""

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return super().run(expert, x) * (2 if expert == self.count - 1 else 1)


class DroppingExperts(OwnExperts):
    """Some outputs are dropped in training."""

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return super().run(expert, x)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.training:
            weights = functional.dropout(weights)
        return super_forward(self, x, chosen, weights)


class CountingExperts(OwnExperts):
    """That count their calls."""

    calls = 0

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super_forward(self, x, chosen, weights)


class Block(nn.Module):
    """Routes tokens to experts."""

    def __init__(self, experts: nn.Module, choices: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, choices, bias=False)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.gate(flat)
        weights, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        return self.experts(flat, chosen, weights).view(x.shape)


class LinearRouter(nn.Linear):
    """A router that is a linear layer itself, and gives a score for every expert."""

    def __init__(self) -> None:
        super().__init__(SIZE, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        best, chosen = logits.topk(TOP, dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(1, chosen, best).sigmoid()


class ThresholdRouter(LinearRouter):
    """By which as many experts are chosen as are likely."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = functional.linear(x, self.weight).sigmoid()
        return scores * (scores > 0.5)


class BatchedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(EXPERTS, SIZE, 2 * INNER))
        self.second = nn.Parameter(torch.zeros(EXPERTS, INNER, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(EXPERTS, -1, SIZE)
        gate, up = torch.bmm(x, self.first).chunk(2, dim=-1)
        return torch.bmm(up * functional.silu(gate), self.second).view(-1, SIZE)


class DenseBlock(nn.Module):
    """All experts on all tokens, scaled by their scores."""

    router_class: type[LinearRouter] = LinearRouter

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = self.router_class(), BatchedExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        scores = self.router(flat)
        every = flat.repeat(EXPERTS, 1)
        every = every * scores.T.reshape(-1, 1)
        made = self.experts(every)
        return made.reshape(EXPERTS, -1, SIZE).sum(dim=0).view(x.shape)


class ThresholdBlock(DenseBlock):
    router_class = ThresholdRouter


class WeighedAfterwards(DenseBlock):
    """By its scores, what experts make is weighed, and not what they are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        scores = self.router(flat)
        every = flat.repeat(EXPERTS, 1)
        made = self.experts(every) * scores.T.reshape(-1, 1)
        return made.reshape(EXPERTS, -1, SIZE).sum(dim=0).view(x.shape)
