"""Reports log-probabilities and ranks under the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transfuse.engine.ranking import rows_per_pass, top_tokens
from transfuse.outputs import Logprob, LogprobsAtPosition


def ranked_logprobs(logits: torch.Tensor, token_ids: Sequence[int], ks: Sequence[int]) -> list[LogprobsAtPosition]:
    """Log-probabilities of one given token and of the most likely ones, per row.

    A rank is one more than the number of tokens with a strictly greater logit, so tokens that tie share it.

    Args:
        logits: [P, V] in any float dtype, raw: before biases, penalties and temperature. No NaN, no +inf.
        token_ids: the token to report in each row, whatever its rank; it comes first.
        ks: how many of the most likely tokens to report in each row; of equal ones the lower ids.

    Returns:
        Per row, token id to `Logprob`, without text.
    """
    step = rows_per_pass(logits.shape[-1])
    reports: list[LogprobsAtPosition] = []
    for start in range(0, len(token_ids), step):
        part = slice(start, start + step)
        reports += _ranked_logprobs(logits[part].float(), token_ids[part], ks[part])
    return reports


def _ranked_logprobs(logits: torch.Tensor, token_ids: Sequence[int], ks: Sequence[int]) -> list[LogprobsAtPosition]:
    given = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    k = min(max(*ks, 1), logits.shape[-1])
    values, ids = top_tokens(logits, k)
    # Ranks compare logits: rounding could make two different ones equal log-probabilities.
    ranks = 1 + (values[:, None, :] > values[:, :, None]).sum(-1)
    given_ranks = 1 + (logits > logits.gather(-1, given)).sum(-1, keepdim=True)
    all_ids = torch.cat([given, ids], dim=-1)
    all_ranks = torch.cat([given_ranks, ranks], dim=-1)
    return make_reports(ks, all_ids.tolist(), logprobs.gather(-1, all_ids).tolist(), all_ranks.tolist())


def make_reports(
    ks: Sequence[int], ids: Sequence[list[int]], logprobs: Sequence[list[float]], ranks: Sequence[list[int]]
) -> list[LogprobsAtPosition]:
    """Reports of rows, from columns whose first is the given token's and whose others are the most likely ones'.

    Args:
        ks: how many of the most likely tokens to report in each row.
        ids: per row, at least as many, or all there are.
        logprobs: of these.
        ranks: of these.
    """
    reports: list[LogprobsAtPosition] = []
    for k, tokens, values, places in zip(ks, ids, logprobs, ranks, strict=True):
        report: LogprobsAtPosition = {}
        for token, logprob, rank in zip(tokens[: 1 + k], values[: 1 + k], places[: 1 + k], strict=True):
            report.setdefault(token, Logprob(logprob, rank))
        reports.append(report)
    return reports
