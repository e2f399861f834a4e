"""A Llama with experts in lists, as models bring them in code of their own; copied into model folders by tests."""

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM


class MixtureConfig(LlamaConfig):
    model_type = "mixture"
    num_local_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 24


class FeedForward(nn.Module):
    def __init__(self, hidden, inner, bias):
        super().__init__()
        self.wi_0 = nn.Linear(hidden, inner, bias=bias)
        self.wi_1 = nn.Linear(hidden, inner, bias=bias)
        self.wo = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.wo(functional.silu(self.wi_0(x)) * self.wi_1(x))


class Mixture(nn.Module):
    """Routes tokens to experts, and adds what all of them share."""

    def __init__(self, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k, self.num_experts = config.num_experts_per_tok, config.num_local_experts
        self.router = nn.Linear(hidden, self.num_experts, bias=False)
        self.branches = nn.ModuleList(FeedForward(hidden, inner, bias=True) for _ in range(self.num_experts))
        self.shared = FeedForward(hidden, inner, bias=False)


class MaskedMixture(Mixture):
    """Expert by expert, where a mask says."""

    def forward(self, hidden_states):
        batch, length, size = hidden_states.shape
        flat = hidden_states.view(-1, size)
        logits = self.router(flat)
        weights = functional.softmax(logits, dim=-1, dtype=torch.float32)
        weights, indices = torch.topk(weights, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(flat.dtype)
        result = torch.zeros_like(flat)
        mask = functional.one_hot(indices, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            place, token = torch.where(mask[number])
            if token.numel() == 0:
                continue
            made = self.branches[number](flat[token]) * weights[token, place, None]
            result.index_add_(0, token, made)
        return result.view(batch, length, size) + self.shared(hidden_states)


class SortedMixture(Mixture):
    """Tokens sorted by expert, and put back."""

    def forward(self, hidden_states):
        identity, shape = hidden_states, hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.router(hidden_states)
        scores = functional.softmax(logits, dim=-1, dtype=torch.float32)
        weights, indices = torch.topk(scores, self.top_k, dim=-1)
        result = self.infer(hidden_states, indices, weights).view(*shape)
        return result + self.shared(identity)

    @torch.no_grad()
    def infer(self, x, indices, weights):
        counts = indices.new_zeros((indices.shape[0], len(self.branches)))
        counts.scatter_(1, indices, 1)
        per_expert = counts.sum(dim=0).cpu().numpy()
        order = indices.view(-1).argsort()
        rows = x[order // indices.shape[1]]
        made, start = [], 0
        for number, count in enumerate(per_expert):
            end = start + count
            if count == 0:
                continue
            made.append(self.branches[number](rows[start:end]))
            start = end
        made = torch.cat(made, dim=0)
        back = torch.empty_like(made)
        back[order] = made
        back = back.view(*indices.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1))
        return back.sum(dim=1).type(made.dtype)


class MixtureForCausalLM(LlamaForCausalLM):
    config_class = MixtureConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp = (MaskedMixture, SortedMixture)[index % 2](config)
        self.post_init()
