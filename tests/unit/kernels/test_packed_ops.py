from __future__ import annotations

import pytest
import torch

import transfuse.kernels.packed_ops  # noqa: F401

Case = tuple[tuple[int, ...], int, int, float, bool]

CASES: dict[str, Case] = {
    "both ways": ((3, 5, 5, 5, 1), -1, -1, 0.0, False),
    "causal": ((3, 5, 5, 1, 7), -1, 0, 0.0, False),
    "window both ways": ((20, 20, 3), 4, 4, 0.0, False),
    "causal window": ((20, 3, 20), 4, 0, 0.0, False),
    "window of a long text": ((1100, 2), 70, 70, 0.0, False),
    "causal window of a long text": ((2, 1100), 70, 0, 0.0, False),
    "softcap": ((6, 600), -1, 0, 3.0, False),
    "softcap and window": ((600, 9), 5, 5, 3.0, False),
    "sinks": ((6, 6, 2), -1, -1, 0.0, True),
}


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_attention_written_out(case: Case, num_kv_heads: int) -> None:
    lengths, behind, ahead, softcap, has_sinks = case
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(total, 4, 8),
        torch.randn(total, num_kv_heads, 8),
        torch.randn(total, num_kv_heads, 6),
    )
    sinks = torch.randn(4) if has_sinks else None
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.full((total, 4, 6), float("nan"))
    torch.ops.transfuse.packed_attention(query, key, value, borders, 0.3, behind, ahead, softcap, sinks, out)
    keys, values = (x.repeat_interleave(4 // num_kv_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(total) - torch.arange(total).unsqueeze(1)
    sees = owner == owner.unsqueeze(1)
    sees &= (behind < 0) | (distance >= -behind)
    sees &= (ahead < 0) | (distance <= ahead)
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, total, 1)), -1)
    weights = scores.softmax(-1)[..., :total]
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, values), atol=2e-6, rtol=1e-5)
