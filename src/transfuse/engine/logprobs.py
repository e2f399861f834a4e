"""Reports log-probabilities and ranks under the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transfuse.engine.ranking import rows_per_pass, top_tokens
from transfuse.errors import NonFiniteLogitsError
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
    given_ranks = 1 + (logits > logits.gather(-1, given)).sum(-1)
    columns = (
        logprobs.gather(-1, given).squeeze(-1).tolist(),
        given_ranks.tolist(),
        ids.tolist(),
        logprobs.gather(-1, ids).tolist(),
        ranks.tolist(),
    )
    reports: list[LogprobsAtPosition] = []
    for token, row_k, logprob, rank, top_ids, top_logprobs, top_ranks in zip(token_ids, ks, *columns, strict=True):
        report = {int(token): Logprob(logprob, rank)}
        for i in range(min(row_k, k)):
            report.setdefault(top_ids[i], Logprob(top_logprobs[i], top_ranks[i]))
        reports.append(report)
    return reports


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> list[LogprobsAtPosition]:
    """Log-probabilities of a prompt's tokens.

    Args:
        logits: [P, V], the raw logits at the positions before the tokens.
        token_ids: the P tokens, each predicted by its row.
        k: how many of the most likely tokens to report beside each.

    Returns:
        Per token, token id to `Logprob`, without text.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf or is all -inf.
    """
    if len(token_ids) == 0:
        return []
    finite = logits.amax(-1).isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise NonFiniteLogitsError(
            f"The model gave NaN or infinite logits for prompt token {row} of the {len(token_ids)} asked for; the "
            "request ends. Run the model in float32 to see whether its dtype overflows."
        )
    return ranked_logprobs(logits, token_ids, [k] * len(token_ids))
