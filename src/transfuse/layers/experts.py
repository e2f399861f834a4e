"""Transformers' experts interface, answered by an op of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from transfuse.kernels.torch_ops import executions
from transfuse.layers.configs import implementation_of

EXPERTS_NAME = "transfuse_experts"


@contextmanager
def fused_experts_of(model: nn.Module) -> Iterator[None]:
    """Within it, the experts of `model` that declare the seam `use_experts_implementation` go to `experts_forward`."""
    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
    with implementation_of(model, "_experts_implementation", EXPERTS_NAME):
        yield


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it, as Transformers calls it.

    Each expert is run once, on the rows that chose it; every row's sum is taken in the order of its choices.

    Args:
        module: has `gate_up_proj` or `up_proj` and `down_proj`, laid out as its flags say (`is_transposed`,
            `has_bias`, `has_gate`), and `_apply_gate`.
        hidden_states: [T, H].
        top_k_index: i64 [T, k], the experts of each row; `num_experts` and above stand for none.
        top_k_weights: [T, k].

    Returns:
        [T, H].
    """
    executions["experts"] += 1
    num_tokens, k = top_k_index.shape
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=module.num_experts).tolist()
    rows = hidden_states[order // k]
    outputs = hidden_states.new_zeros(num_tokens * k, hidden_states.shape[-1])
    start = 0
    for expert in range(module.num_experts):
        stop = start + counts[expert]
        if stop > start:
            outputs[order[start:stop]] = _expert(module, expert, rows[start:stop])
        start = stop
    weighted = outputs.view(num_tokens, k, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _expert(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    x = _project(module, name, expert, x)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _project(module, "down_proj", expert, x)
    return module.post_expert_norm(x) if getattr(module, "has_post_expert_norm", False) else x


def _project(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return nn.functional.linear(x, weight.T if module.is_transposed else weight, bias)
