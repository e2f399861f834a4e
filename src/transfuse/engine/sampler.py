"""Turns one step's logits into one token per sequence."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transfuse.engine.draw import make_filters, uniforms
from transfuse.engine.grammar_masks import GrammarMasks, GrammarState
from transfuse.engine.logit_edits import LogitEdits, apply_edits
from transfuse.engine.masks import NO_MASKS, Masks
from transfuse.engine.penalties import apply_penalties, count_tokens
from transfuse.engine.ranking import rows_per_pass
from transfuse.engine.sampling import SamplingKernels, TorchSampling
from transfuse.errors import NonFiniteLogitsError, RequestError, TransfuseError
from transfuse.outputs import LogprobsAtPosition

if TYPE_CHECKING:
    from transfuse.engine.request import Request


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row of logits came to.

    Attributes:
        token_id: the token; -1 where `error` is set.
        logprob: its log-probability under the raw distribution; None unless asked for.
        top: it and the most likely tokens, without text; None unless asked for.
        completes: whether the request's grammar has nothing after it.
        error: why this request, and no other, has no token.
    """

    token_id: int
    logprob: float | None = None
    top: LogprobsAtPosition | None = None
    completes: bool = False
    error: TransfuseError | None = None


class _RequestState:
    """What is kept of a request between steps."""

    __slots__ = ("counts", "edits", "grammar", "is_greedy", "num_logprobs", "request", "seed")

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self.request = request
        self.is_greedy = params.is_greedy
        self.num_logprobs = params.logprobs
        self.seed = secrets.randbits(63) if request.seed is None else request.seed
        edits = LogitEdits(request, vocab_size)
        self.edits = edits if edits.is_active(num_output_tokens=0) else None
        self.counts = count_tokens(request, vocab_size)
        self.grammar = None if request.grammar is None else GrammarState(request.grammar, request)

    def edits_logits(self) -> bool:
        """Whether the next token is chosen by other logits than the model's own, masked or not."""
        if self.counts is not None:
            return True
        return self.edits is not None and self.edits.is_active(len(self.request.output_token_ids))


class Sampler:
    """Samples one token for each row of logits, as the row's request asks.

    Raw logprobs are taken first; then `logit_bias`, `bad_words`, `min_tokens` and the grammar act, then the penalties
    (repetition, frequency, presence), temperature, `min_p`, `top_k`, `top_p`, and the draw. A request's token depends
    on its own logits, parameters, seed and output alone: not on the batch, on the order of rows or on preemption. Of
    equal logits the lower id counts as the more likely.

    Args:
        kernels: what computes on whole rows; torch if not given.
        num_threads: most that compute masks.
    """

    def __init__(self, kernels: SamplingKernels | None = None, num_threads: int = 1) -> None:
        self.kernels: SamplingKernels = TorchSampling() if kernels is None else kernels
        self._grammars = GrammarMasks(num_threads)
        self._states: dict[str, _RequestState] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Samples the next token of each request.

        Args:
            logits: [S, V] in any float dtype; left unchanged. Row i belongs to `requests[i]`. V may be less than the
                tokens that the model embeds.
            requests: the S requests.

        Returns:
            One `SampledToken` per row. A row that holds NaN or +inf, or has no token left to choose from, carries an
            error; the other rows do not notice.
        """
        assert logits.dim() == 2 and len(logits) == len(requests), (logits.shape, len(requests))
        tokens, finite = self.kernels.argmax(logits)
        errors: dict[int, TransfuseError] = {i: _non_finite(requests[i]) for i, ok in enumerate(finite) if not ok}
        states: dict[int, _RequestState] = {}
        for row, request in enumerate(requests):
            if row not in errors:
                try:
                    states[row] = self._state(request, logits.shape[-1])
                except RequestError as error:
                    errors[row] = error
        grammars = {row: state.grammar for row, state in states.items() if state.grammar is not None}
        masks, failed = self._grammars.compute(grammars, logits.shape[-1])
        errors |= failed
        for row, token in self._choices(
            logits, {row: state for row, state in states.items() if row not in failed}, masks
        ):
            if token is None:
                errors[row] = _nothing_left(requests[row])
            else:
                tokens[row] = token
        reports = self._report(logits, states, tokens, errors)
        complete = {
            row
            for row, state in states.items()
            if state.grammar is not None and row not in errors and state.grammar.accept(tokens[row])
        }
        return [_sampled(token, reports.get(row), row in complete, errors.get(row)) for row, token in enumerate(tokens)]

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request that has ended; unknown ids are fine."""
        self._states.pop(request_id, None)

    def _state(self, request: Request, vocab_size: int) -> _RequestState:
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            state = self._states[request.request_id] = _RequestState(request, vocab_size)
        return state

    def _choices(
        self, logits: torch.Tensor, states: dict[int, _RequestState], masks: Masks
    ) -> Iterator[tuple[int, int | None]]:
        """The tokens of rows for which the raw argmax will not do; None where there is none to choose from."""
        edited, masked, drawn = list[int](), list[int](), list[int]()
        for row, state in states.items():
            if state.edits_logits():
                edited.append(row)
            elif state.grammar is not None:
                masked.append(row)
            elif not state.is_greedy:
                drawn.append(row)
        yield from zip(drawn, self._draw(logits, drawn, [states[row] for row in drawn]), strict=True)
        step = rows_per_pass(logits.shape[-1])
        for rows, choose in ((masked, self._choose), (edited, self._choose_edited)):
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                yield from zip(part, choose(logits, part, [states[row] for row in part], masks), strict=True)

    def _choose_edited(
        self, logits: torch.Tensor, rows: list[int], states: list[_RequestState], masks: Masks
    ) -> list[int | None]:
        """`_choose` by logits that are changed first."""
        edited = torch.empty(len(rows), logits.shape[-1], dtype=torch.float32, device=logits.device)
        for target, row in zip(edited, rows, strict=True):
            # Row by row: to gather them first takes several times as long.
            target.copy_(logits[row])
        _edit(edited, states)
        return self._choose(edited, list(range(len(rows))), states, masks.moved(rows))

    def _choose(
        self, logits: torch.Tensor, rows: list[int], states: list[_RequestState], masks: Masks
    ) -> list[int | None]:
        """The next token of each of some rows; None where there is none to choose from."""
        chosen, alive = self.kernels.argmax(logits, rows, masks)
        tokens: list[int | None] = [token if ok else None for token, ok in zip(chosen, alive, strict=True)]
        drawn = [i for i, state in enumerate(states) if alive[i] and not state.is_greedy]
        found = self._draw(logits, [rows[i] for i in drawn], [states[i] for i in drawn], masks)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
        return tokens

    def _draw(
        self, logits: torch.Tensor, rows: list[int], states: list[_RequestState], masks: Masks = NO_MASKS
    ) -> list[int]:
        if not rows:
            return []
        uniform = uniforms([s.seed for s in states], [len(s.request.output_token_ids) for s in states])
        filters = make_filters([s.request.params for s in states], uniform, logits.shape[-1], logits.device)
        return self.kernels.draw(logits, rows, filters, masks)

    def _report(
        self,
        logits: torch.Tensor,
        states: dict[int, _RequestState],
        tokens: list[int],
        errors: dict[int, TransfuseError],
    ) -> dict[int, LogprobsAtPosition]:
        asked = {
            row: state.num_logprobs
            for row, state in states.items()
            if state.num_logprobs is not None and row not in errors
        }
        if not asked:
            return {}
        rows = list(asked)
        reports = self.kernels.ranked_logprobs(logits, rows, [tokens[row] for row in rows], list(asked.values()))
        return dict(zip(rows, reports, strict=True))


def _edit(logits: torch.Tensor, states: list[_RequestState]) -> None:
    """Changes rows in place. What is masked stays so whatever the order, so that masks may come last."""
    outputs = [state.request.output_token_ids for state in states]
    apply_edits(logits, [(row, s.edits, outputs[row]) for row, s in enumerate(states) if s.edits is not None])
    penalised = [(row, s.counts, s.request.params) for row, s in enumerate(states) if s.counts is not None]
    for row, counts, _ in penalised:
        counts.update(outputs[row])
    apply_penalties(logits, penalised)


def _sampled(
    token: int, report: LogprobsAtPosition | None, completes: bool, error: TransfuseError | None
) -> SampledToken:
    if error is not None:
        return SampledToken(-1, error=error)
    logprob = None if report is None else report[token].logprob
    return SampledToken(token, logprob, report, completes)


def _non_finite(request: Request) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"The model gave NaN or infinite logits for request {request.request_id} at output token "
        f"{len(request.output_token_ids)}; this request ends, others go on. Run the model in float32 to see whether "
        "its dtype overflows."
    )


def _nothing_left(request: Request) -> RequestError:
    return RequestError(
        f"bad_words, min_tokens and structured_outputs forbid every token that the model allows for request "
        f"{request.request_id} at output token {len(request.output_token_ids)}. Forbid fewer tokens or lower "
        "min_tokens."
    )
