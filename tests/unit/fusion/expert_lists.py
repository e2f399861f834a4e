"""Experts that are modules of a list, in the loops that models run them in, and loops that only look alike."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.unit.fusion.custom_models import SIZE

EXPERTS, TOP, INNER = 6, 2, 16


class Gated(nn.Module):
    """One feed-forward; nothing is called as Transformers would."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(SIZE, INNER, bias=bias), nn.Linear(SIZE, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, SIZE, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(SIZE, 2 * INNER), nn.Linear(INNER, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.rise(x).chunk(2, dim=-1)
        return self.fall(up * functional.gelu(gate))


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(SIZE, INNER), nn.GELU(), nn.Linear(INNER, SIZE))


class Dropping(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.drop(functional.silu(self.w1(x)) * self.w3(x)))


class Masked(nn.Module):
    """As Mixtral was written at first: a mask by expert, and results added where they belong."""

    expert: type[nn.Module] = Gated

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, TOP
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False)
        self.experts = nn.ModuleList(self.expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = functional.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


class PackedMasked(Masked):
    expert = Packed


class PlainMasked(Masked):
    expert = Plain


class DroppingMasked(Masked):
    expert = Dropping


class Routed(nn.Module):
    """Whose experts are called something else, and are run by what its subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = EXPERTS
        self.switch = nn.Linear(SIZE, EXPERTS, bias=False)
        self.specialists = nn.ModuleList(Gated(bias=False) for _ in range(EXPERTS))
        self.common = Gated()

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class Hit(Routed):
    """Only experts that were chosen run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.switch(flat)
        scores = logits.sigmoid()
        share, chosen = torch.topk(scores, TOP, dim=-1)
        mask = functional.one_hot(chosen, self.classes).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
        result = torch.zeros_like(flat)
        for one in hit:
            place, token = mask[one].squeeze(0).nonzero(as_tuple=True)
            made = self.specialists[one](flat[token])
            result.index_add_(0, token, made * share[token, place].unsqueeze(-1))
        return result.view_as(x) + self.common(x)


class Dense(Routed):
    """All run on all tokens, and most results are weighed by zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.switch(x.flatten(0, 1))
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        flat = x.reshape(-1, SIZE)
        total = torch.zeros_like(flat)
        for index, specialist in enumerate(self.specialists):
            weight = (share * (chosen == index)).sum(-1, keepdim=True)
            total = total + weight * specialist(flat)
        return self.common(x) + total.view(x.shape)


class Sorted(Routed):
    """As DeepSeek's experts run without gradients: sorted by expert, then put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity, shape = x, x.shape
        x = x.view(-1, x.shape[-1])
        logits = self.switch(x)
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        y = self.infer(x, chosen, share).view(*shape)
        if self.common is not None:
            y = y + self.common(identity)
        return y

    def infer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts = ids.new_zeros((ids.shape[0], len(self.specialists)))
        counts.scatter_(1, ids, 1)
        per_expert = counts.sum(dim=0)
        order = ids.view(-1).argsort()
        tokens = x[order // ids.shape[1]]
        per_expert = per_expert.tolist()
        outputs = []
        start = 0
        for i, count in enumerate(per_expert):
            end = start + count
            if count == 0:
                continue
            expert = self.specialists[i]
            outputs.append(expert(tokens[start:end]))
            start = end
        made = torch.cat(outputs, dim=0) if len(outputs) else tokens.new_empty(0)
        back = torch.empty_like(made)
        back[order] = made
        return back.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(back.dtype)


class WithoutGradients(Sorted):
    """Whose experts are not trained."""

    @torch.no_grad()
    def infer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return Sorted.infer(self, x, ids, weights)


class Repeated(Routed):
    """As DeepSeek's experts run in training: each token once for each of its experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity, shape = x, x.shape
        logits = self.switch(x.view(-1, SIZE))
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        x = x.view(-1, x.shape[-1])
        flat = chosen.view(-1)
        x = x.repeat_interleave(TOP, dim=0)
        y = torch.empty_like(x)
        for i, expert in enumerate(self.specialists):
            y[flat == i] = expert(x[flat == i])
        y = (y.view(*share.shape, -1) * share.unsqueeze(-1)).sum(dim=1)
        y = y.view(*shape)
        return y + self.common(identity)


class Weighed(Routed):
    """Scales what experts are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.switch(flat)
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        total = torch.zeros_like(flat)
        for index, specialist in enumerate(self.specialists):
            token, place = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            total.index_add_(0, token, specialist(flat[token] * share[token, place, None]))
        return total.view_as(x)


class Listed(nn.ModuleList):
    """A list that runs its own modules."""

    def __init__(self) -> None:
        super().__init__(Gated() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for index in range(len(self)):
            token, place = torch.where(chosen == index)
            result.index_add_(0, token, self[index](x[token]) * share[token, place, None])
        return result


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(SIZE, EXPERTS), Listed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.gate(flat)
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        return self.experts(flat, chosen, share).view(x.shape)


class Arrays(Sorted):
    """That counts with numpy."""

    @torch.no_grad()
    def infer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        flat = ids.view(-1)
        order = flat.argsort()
        ends = flat.bincount(minlength=self.classes).cpu().numpy().cumsum(0)
        tokens = order // TOP
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            token = tokens[start:end]
            made = self.specialists[i](x[token])
            made.mul_(weights.view(-1, 1)[order[start:end]])
            result.scatter_reduce_(0, token.view(-1, 1).repeat(1, x.shape[-1]), made, reduce="sum")
        return result


class Looped(Routed):
    """The loop of which others change one thing."""

    limit = 5000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.switch(flat)
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        total = torch.zeros_like(flat)
        for index, specialist in enumerate(self.specialists):
            token, place = self.chosen_by(chosen == index, self.limit)
            made = self.made(specialist, flat[token], index)
            total.index_add_(0, token, made * share[token, place, None])
        return total.view_as(x)

    def chosen_by(self, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
        return torch.where(mask)

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return specialist(x)


class Capped(Looped):
    """An expert takes its share of the tokens and some more, and no others."""

    def chosen_by(self, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
        capacity = int(1.25 * mask.numel() / EXPERTS) + 1
        token, place = torch.where(mask)
        return token[:capacity], place[:capacity]


class CappedAtMany(Looped):
    """An expert takes more tokens than most steps have, and no others."""

    def chosen_by(self, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
        token, place = torch.where(mask)
        return token[:limit], place[:limit]


class CappedBeyondTrying(CappedAtMany):
    limit = 10**7


class Compared(Looped):
    def chosen_by(self, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
        token, place = torch.where(mask)
        return (token, place) if len(token) < limit * limit else (token[:1], place[:1])


class Limited(Looped):
    def chosen_by(self, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
        token, place = torch.where(mask)
        count = min(len(token), limit * limit)
        return token[:count], place[:count]


class Noisy(Looped):
    """That forgets some in training."""

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return functional.dropout(specialist(x), 0.1, self.training)


class Counting(Looped):
    calls = 0

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        self.calls += 1
        return specialist(x)


class Counted(Looped):
    """That keeps how many tokens each expert was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        self.load[index].add_(len(x))
        return specialist(x)


class Telling(Looped):
    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        print(index)
        return specialist(x)


class NormedOutputs(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.norm(specialist(x))


class LastIsStronger(Looped):
    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return specialist(x) * (2 if index == EXPERTS - 1 else 1)


class LastIsLarger(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.specialists[-1].w1 = nn.Linear(SIZE, 2 * INNER, bias=False)
        self.specialists[-1].w3 = nn.Linear(SIZE, 2 * INNER, bias=False)
        self.specialists[-1].w2 = nn.Linear(2 * INNER, SIZE, bias=False)


class Hooked(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.specialists[2].register_forward_hook(lambda module, args, output: None)


class Constant(Looped):
    """Whose weights are not trained."""

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return specialist(x.detach())


class Mixed(Looped):
    """An expert sees what the tokens beside it are."""

    def made(self, specialist: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return specialist(x - x.mean(0))


class WideResults(Looped):
    """That sums in float32, and gives that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, SIZE)
        logits = self.switch(flat)
        share, chosen = logits.softmax(-1).topk(TOP, dim=-1)
        total = torch.zeros_like(flat, dtype=torch.float32)
        for index, specialist in enumerate(self.specialists):
            token, place = torch.where(chosen == index)
            total.index_add_(0, token, (specialist(flat[token]) * share[token, place, None]).float())
        return total.view_as(x)
