"""The engine as the front sees it: messages in, messages out."""

from __future__ import annotations

from collections.abc import Sequence

from transfuse.engine.engine import Engine, TokenOutput
from transfuse.engine.request import Request
from transfuse.errors import PromptError, RequestError, StructuredOutputsError
from transfuse.messages import CoreStats, ModelLimits, NewRequest, RequestUpdate, StepReport
from transfuse.sampling_params import MAX_SEED


class EngineCore:
    """Runs the requests that messages bring, and reports every step as a message.

    Args:
        engine: the step loop.
        limits: of the model; what is sent is checked again here, since a core outlives a front's mistakes.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, engine: Engine, limits: ModelLimits, eos_token_ids: frozenset[int]) -> None:
        self._engine = engine
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, Request] = {}

    @property
    def engine(self) -> Engine:
        """The step loop, for its numbers."""
        return self._engine

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self._engine.has_unfinished

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._check(new)
        request = Request(
            request_id=new.request_id,
            prompt_token_ids=new.prompt_token_ids,
            params=new.params,
            max_tokens=new.max_tokens,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=new.bad_words_token_ids,
            priority=new.priority,
            arrival_time=new.arrival_time,
            salt=new.salt,
            seed=new.seed,
        )
        self._engine.add(request)
        self._requests[new.request_id] = request

    def _check(self, new: NewRequest) -> None:
        size = self._limits.vocab_size
        for token in new.prompt_token_ids:
            if not 0 <= token < size:
                raise PromptError(f"A prompt token is {token}; expected ids from 0 to {size - 1}.")
        if not 1 <= new.max_tokens < 2**31:
            raise RequestError(f"max_tokens is {new.max_tokens}; expected at least 1.")
        if new.seed is not None and not 0 <= new.seed <= MAX_SEED:
            raise RequestError(f"seed is {new.seed}; expected an integer from 0 to {MAX_SEED}.")
        if not all(new.bad_words_token_ids):
            raise RequestError("A bad word has no tokens; leave it out.")
        if new.params.structured_outputs is not None:
            raise StructuredOutputsError("Structured outputs are not served yet; parse the text instead.")
        used = [*(new.params.stop_token_ids or ()), *(new.params.logit_bias or ())]
        used += (token for word in new.bad_words_token_ids for token in word)
        if not all(0 <= token < size for token in used):
            raise RequestError(f"A sampling field holds a token id beyond the vocabulary's {size}.")

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, whatever they are doing; unknown ids are fine."""
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def stop(self, request_id: str, stop_reason: str) -> None:
        """End a request at a stop string that its text came to; an unknown id is fine."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._engine.stop(request, stop_reason)

    def step(self) -> StepReport:
        """Compute one batch; a request that fails ends with `finish_reason` `error`, and others lose nothing."""
        outputs = self._engine.step()
        for output in outputs:
            if output.request.finish_reason is not None:
                self._requests.pop(output.request.request_id, None)
        return StepReport([_update(output) for output in outputs], self.stats())

    def stats(self) -> CoreStats:
        """The numbers as they are now."""
        scheduler = self._engine.scheduler
        return CoreStats(
            num_steps=self._engine.num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.num_referenced / scheduler.pool.num_total,
            prefix_cache_queries=scheduler.num_prefix_queries,
            prefix_cache_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Give back the model as it was, and end threads."""
        self._engine.close()


def _update(output: TokenOutput) -> RequestUpdate:
    request, token = output.request, output.token
    stop_reason = request.stop_reason
    assert not isinstance(stop_reason, str), "stop strings are the front's"
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=[] if token is None else [token.token_id],
        logprobs=None if token is None or token.top is None else [token.top],
        prompt_logprobs=list(output.prompt_logprobs),
        first_target=output.first_target,
        finish_reason=request.finish_reason,
        stop_reason=stop_reason,
        error=request.error,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finished_time=request.finished_time,
    )
