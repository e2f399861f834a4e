"""The engine of a pooling model as the front sees it: texts in, vectors or scores out."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence

import torch

from transfuse.engine.model_errors import as_engine_error
from transfuse.engine.pooling.forward import Text, TextForward
from transfuse.engine.pooling.request import PoolingRequest
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import (
    CapacityError,
    NonFiniteLogitsError,
    PromptError,
    RequestError,
    TransfuseError,
    WrongTaskError,
)
from transfuse.messages import CoreStats, ModelLimits, NewPooling, NewRequest, RequestUpdate, StepReport
from transfuse.progress import ProgressCounter

log = logging.getLogger(__name__)

# Among so many times as many texts as a batch may hold those of like lengths are looked for, where a batch is padded.
_LOOKAHEAD = 4
# How much longer than the shortest text of a padded batch the longest may be: a share, and tokens.
_LONGER = 1.25, 8

# A text's hidden states [n, H] or logits [labels] to what is sent back, float32 [dim].
Finish = Callable[[torch.Tensor, PoolingRequest], torch.Tensor]


class PoolingCore:
    """Runs the texts that messages bring, and reports every step as a message.

    Args:
        forward: the model.
        finish: what becomes of what it gives.
        limits: of the model; what is sent is checked again here, since a core outlives a front's mistakes.
        max_texts: most texts in a step.
        budget: how many tokens a step may have; a text that is longer runs alone.
        by_priority: whether lower priorities are served first, rather than in order of arrival.
        clock: seconds.
    """

    def __init__(
        self,
        forward: TextForward,
        finish: Finish,
        limits: ModelLimits,
        max_texts: int,
        budget: StepBudget,
        *,
        by_priority: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forward = forward
        self._finish = finish
        self._limits = limits
        self._max_texts = min(max_texts, forward.max_texts or max_texts)
        self._budget = budget
        self._by_priority = by_priority
        self._clock = clock
        self._waiting: list[PoolingRequest] = []
        self._requests: dict[str, PoolingRequest] = {}
        # After a step that failed, its texts run one by one.
        self._alone: set[str] = set()
        self._num_steps = 0
        self._num_step_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting)

    def show_progress(self, counter: ProgressCounter) -> None:
        """Have `counter` bumped whenever a layer of the model begins to compute."""
        self._forward.show_progress(counter)

    def add(self, new: NewRequest) -> None:
        """Refuse a text to continue.

        Raises:
            WrongTaskError: always.
        """
        raise WrongTaskError("This model makes vectors or scores of texts; it generates none.")

    def stop(self, request_id: str, stop_reason: str) -> None:
        """Nothing: only a text that is generated comes to a stop string."""

    def prepare_grammars(self) -> None:
        """Nothing: no text is held to a form."""

    def add_text(self, new: NewPooling) -> None:
        """Queue a text.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._check(new)
        request = PoolingRequest(
            request_id=new.request_id,
            token_ids=new.token_ids,
            type_ids=new.type_ids or [0] * len(new.token_ids),
            num_skipped=new.num_skipped,
            dimensions=new.dimensions,
            priority=new.priority if self._by_priority else 0,
            arrival_time=new.arrival_time,
        )
        self._requests[new.request_id] = request
        insort(self._waiting, request, key=lambda one: one.priority)

    def _check(self, new: NewPooling) -> None:
        if new.request_id in self._requests:
            raise RequestError(f"Request id {new.request_id!r} is in use by an unfinished request; choose another.")
        size, longest = self._limits.vocab_size, self._limits.max_model_len
        if not new.token_ids or not all(0 <= token < size for token in new.token_ids):
            raise PromptError(f"A text has no tokens, or one that is not from 0 to {size - 1}.")
        if len(new.token_ids) > longest:
            raise CapacityError(f"A text has {len(new.token_ids)} tokens; the limit is max_model_len={longest}.")
        if new.type_ids and len(new.type_ids) != len(new.token_ids):
            raise RequestError(f"There are {len(new.type_ids)} type ids for {len(new.token_ids)} tokens.")
        if not all(0 <= kind <= 1 for kind in new.type_ids):
            raise RequestError("A type id is neither 0 nor 1.")
        if new.dimensions is not None and new.dimensions < 1:
            raise RequestError(f"dimensions is {new.dimensions}; expected at least 1.")

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are fine."""
        gone = {name for name in request_ids if self._requests.pop(name, None) is not None}
        if gone:
            self._alone -= gone
            self._waiting = [request for request in self._waiting if request.request_id not in gone]

    def step(self) -> StepReport:
        """Compute one batch; a text that fails ends with `finish_reason` `error`, and others lose nothing."""
        batch = self._next_batch()
        if not batch:
            return StepReport([], self.stats())
        started = self._clock()
        for request in batch:
            request.first_scheduled_time = request.first_scheduled_time or started
        self._num_steps += 1
        try:
            found = self._compute(batch)
        except Exception as error:
            return StepReport(self._fail(batch, error), self.stats())
        num_tokens = sum(len(request.token_ids) for request in batch)
        self._num_step_tokens += num_tokens
        self._budget.observe(num_tokens, self._clock() - started)
        self.abort([request.request_id for request in batch])
        return StepReport([self._ended(*pair) for pair in zip(batch, found, strict=True)], self.stats())

    def _next_batch(self) -> list[PoolingRequest]:
        """The texts to run next, the one that has waited longest among them; they stay in the queue until they end."""
        if not self._waiting:
            return []
        first = self._waiting[0]
        if first.request_id in self._alone:
            return [first]
        batch, shortest, longest, num_tokens = [first], len(first.token_ids), len(first.token_ids), len(first.token_ids)
        lookahead = self._max_texts * (_LOOKAHEAD if self._forward.pads else 1)
        for request in self._waiting[1:lookahead]:
            if len(batch) == self._max_texts:
                break
            length = len(request.token_ids)
            low, high = min(shortest, length), max(longest, length)
            if request.request_id in self._alone or (self._forward.pads and high > low * _LONGER[0] + _LONGER[1]):
                continue
            total = high * (len(batch) + 1) if self._forward.pads else num_tokens + length
            if total > self._budget.value:
                if self._forward.pads:
                    continue
                break
            batch.append(request)
            shortest, longest, num_tokens = low, high, num_tokens + length
        return batch

    def _compute(self, batch: Sequence[PoolingRequest]) -> list[torch.Tensor | TransfuseError]:
        found = self._forward.run([Text(request.token_ids, request.type_ids) for request in batch])
        results: list[torch.Tensor | TransfuseError] = []
        for request, one in zip(batch, found, strict=True):
            result = self._finish(one, request)
            if bool(torch.isfinite(result).all()):
                results.append(result)
            else:
                failed = f"The model gave NaN or infinity for request {request.request_id}."
                results.append(NonFiniteLogitsError(failed))
        return results

    def _fail(self, batch: Sequence[PoolingRequest], error: Exception) -> list[RequestUpdate]:
        """Find out whose fault a failed step was: every text of it runs again alone, and who fails alone ends."""
        if len(batch) > 1:
            log.warning("a step of %d texts failed (%s); running them one by one", len(batch), error)
            self._alone.update(request.request_id for request in batch)
            return []
        (request,) = batch
        told = as_engine_error(request.request_id, error, self._forward.code_folder)
        log.error("%s", told, exc_info=error)
        self.abort([request.request_id])
        return [self._ended(request, told)]

    def _ended(self, request: PoolingRequest, result: torch.Tensor | TransfuseError) -> RequestUpdate:
        failed = isinstance(result, TransfuseError)
        return RequestUpdate(
            request_id=request.request_id,
            pooled=b"" if isinstance(result, TransfuseError) else result.numpy().tobytes(),
            finish_reason="error" if failed else "stop",
            error=result if isinstance(result, TransfuseError) else None,
            first_scheduled_time=request.first_scheduled_time,
            finished_time=self._clock(),
        )

    def stats(self) -> CoreStats:
        """The numbers as they are now."""
        return CoreStats(
            num_steps=self._num_steps,
            num_step_tokens=self._num_step_tokens,
            num_step_prompt_tokens=self._num_step_tokens,
            num_waiting=len(self._waiting),
        )

    def close(self) -> None:
        """Give back the model as it was."""
        self._forward.close()
