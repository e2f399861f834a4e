"""Plain-torch kernels of mixtures of experts: which experts each token goes to, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from transfuse.kernels.fused_ops import ACTIVATIONS, fused_op, glu, wide

SCORINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: functional.softplus(logits).sqrt(),
}


@fused_op(
    "route(Tensor logits, Tensor? bias, int top_k, str scoring, bool late=False, bool normalise=False, float eps=0.0, "
    "float floor=0.0, float scale=1.0, Tensor? expert_scale=None, int num_groups=1, int top_groups=1, "
    "bool best_two=True, float? fill=None, ScalarType? dtype=None, float cutoff=0.0) -> (Tensor, Tensor)"
)
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    late: bool = False,
    normalise: bool = False,
    eps: float = 0.0,
    floor: float = 0.0,
    scale: float = 1.0,
    expert_scale: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    best_two: bool = True,
    fill: float | None = None,
    dtype: torch.dtype | None = None,
    cutoff: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights, computed in at least float32 and rounded once.

    Args:
        logits: [T, num_experts].
        bias: [num_experts], added for the choice only (https://arxiv.org/abs/2408.15664); None for none.
        top_k: experts per token.
        scoring: a key of `SCORINGS`; or `sparsemixer` (https://arxiv.org/abs/2409.12136, as it is without training),
            by which the best experts are taken one by one, and each is weighed by a softmax over those that are left
            and near it; it knows neither bias nor groups.
        late: whether experts are chosen by their logits and only the chosen ones are scored.
        normalise: whether a token's weights are divided by their sum.
        eps: added to that sum.
        floor: the least that it is taken to be.
        scale: factor on the weights.
        expert_scale: [num_experts], a factor on the weights of each expert; None for none.
        num_groups: into which the experts are divided, one after the other; a token's experts come from its
            `top_groups` best groups (https://arxiv.org/abs/2405.04434).
        top_groups: groups per token.
        best_two: whether a group counts by the sum of its two best experts, or by its best one.
        fill: what experts of other groups are chosen by; None: never.
        dtype: of the weights; None for float32.
        cutoff: with `sparsemixer`, how far below the best one an expert may be, in parts of the larger of the best
            logit and its own size.

    Returns:
        Weights [T, top_k] and indices i64 [T, top_k].
    """
    logits = wide(logits)
    if scoring == "sparsemixer":
        weights, indices = _one_by_one(logits, top_k, cutoff)
    else:
        scores = logits if late else SCORINGS[scoring](logits)
        choice = scores if bias is None else scores + wide(bias)
        if num_groups > 1:
            choice = _within_best_groups(choice, num_groups, top_groups, best_two, fill)
        indices = choice.topk(top_k, dim=-1).indices
        weights = scores.gather(-1, indices)
        if late:
            weights = SCORINGS[scoring](weights)
    if normalise:
        total = weights.sum(-1, keepdim=True)
        total = total + eps if eps else total
        weights = weights / (total.clamp(min=floor) if floor else total)
    if scale != 1.0:
        weights = weights * scale
    if expert_scale is not None:
        weights = weights * wide(expert_scale)[indices]
    return (weights if dtype is None else weights.to(dtype)), indices


def _one_by_one(logits: torch.Tensor, top_k: int, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    left = logits
    weights, indices = [], []
    for _ in range(top_k):
        best, index = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > cutoff
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, index))
        indices.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(indices, -1)


def _within_best_groups(
    choice: torch.Tensor, num_groups: int, top_groups: int, best_two: bool, fill: float | None
) -> torch.Tensor:
    grouped = choice.view(choice.shape[0], num_groups, -1)
    by_group = grouped.topk(2, dim=-1).values.sum(-1) if best_two else grouped.amax(-1)
    best = by_group.topk(top_groups, dim=-1).indices
    others = torch.ones_like(by_group, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(others.unsqueeze(-1), float("-inf") if fill is None else fill).view_as(choice)


@fused_op(
    "experts(Tensor x, Tensor indices, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
    "str activation, str? layout='halves', float? limit=None, float offset=0.0, bool is_transposed=False, "
    "Tensor? gate=None, bool identity=False, bool weigh_inputs=False) -> Tensor"
)
def experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str | None = "halves",
    limit: float | None = None,
    offset: float = 0.0,
    is_transposed: bool = False,
    gate: torch.Tensor | None = None,
    identity: bool = False,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it.

    Each expert is run once, on the rows that chose it; every row's sum is taken in the order of its choices.

    Args:
        x: [T, H].
        indices: i64 [T, k], the experts of each row; `num_experts` and above stand for none, or for the row itself.
        weights: [T, k].
        up: [num_experts, 2 * N, H], or [num_experts, N, H] without a gate or with one of its own; rows of experts that
            `down` does not have are not used.
        up_bias: [num_experts, 2 * N] or [num_experts, N], or None.
        down: [num_experts, H, N].
        down_bias: [num_experts, H], or None.
        activation: a key of `ACTIVATIONS`.
        layout: how gate and up lie in the rows, as in `linear_glu`; None where there is no gate.
        limit: see `glu`.
        offset: see `glu`.
        is_transposed: whether the last two dimensions of `up`, `gate` and `down` are the other way round.
        gate: [num_experts, N, H], where it is not in the rows of `up`; the layout is `halves` then.
        identity: whether indices from `num_experts` on give the row as it is (https://arxiv.org/abs/2410.07348).
        weigh_inputs: whether weights are factors on what experts are given and not on what they make of it.

    Returns:
        [T, H].
    """
    if x.is_meta:
        return torch.empty_like(x)
    num_experts, num_tokens, k = down.shape[0], *indices.shape
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=num_experts).tolist()
    rows = x[order // k]
    if weigh_inputs:
        rows, weights = (rows * weights.reshape(-1)[order].unsqueeze(-1)).to(x.dtype), torch.ones_like(weights)
    parts, start = [], 0
    for expert in range(num_experts):
        stop = start + counts[expert]
        if stop > start:
            part = _linear(rows[start:stop], up, up_bias, expert, is_transposed)
            if gate is not None:
                part = torch.cat((_linear(rows[start:stop], gate, None, expert, is_transposed), part), -1)
            part = ACTIVATIONS[activation](part) if layout is None else glu(part, activation, layout, limit, offset)
            parts.append(_linear(part, down, down_bias, expert, is_transposed))
        start = stop
    if identity and start < len(rows):
        parts.append(rows[start:])
        start = len(rows)
    outputs = x.new_zeros(num_tokens * k, x.shape[-1])
    if parts:
        outputs = outputs.index_copy(0, order[:start], torch.cat(parts))
    return (outputs.view(num_tokens, k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int, is_transposed: bool
) -> torch.Tensor:
    matrix = weight[expert].T if is_transposed else weight[expert]
    return functional.linear(x, matrix, None if bias is None else bias[expert])
