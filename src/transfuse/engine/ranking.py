"""Orders logits by one total order: higher first, and of equal ones the lower token id first."""

from __future__ import annotations

import torch

# Most logits that one pass copies. Its float64 sums then take 16 MB, which stays in the allocator's hands: larger
# tensors come from the operating system each time, and to touch their new pages costs more than the arithmetic.
MAX_LOGITS_PER_PASS = 2**21


def rows_per_pass(vocab_size: int) -> int:
    """How many rows of `vocab_size` logits are worked on at a time."""
    return max(1, MAX_LOGITS_PER_PASS // vocab_size)


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `k` tokens of each row in the total order.

    Args:
        logits: [R, V], without NaN.
        k: how many, 1..V.

    Returns:
        Their logits and their ids, [R, k] each.
    """
    vocab_size = logits.shape[-1]
    # `topk` picks any of the tokens that tie at its border, so it must reach past the k-th token's ties.
    width = k + k // 2 + 16
    if 2 * width >= vocab_size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    values, ids = _sort_candidates(*logits.topk(width, dim=-1))
    last = values[:, k - 1]
    cut_in_ties = (last == values[:, -1]) & (last > -torch.inf)
    values, ids = values[:, :k], ids[:, :k]
    if bool(cut_in_ties.any()):
        rows = cut_in_ties.nonzero().flatten()
        exact_values, exact_ids = logits[rows].sort(dim=-1, descending=True, stable=True)
        values[rows], ids[rows] = exact_values[:, :k], exact_ids[:, :k]
    return values, ids


def _sort_candidates(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)
