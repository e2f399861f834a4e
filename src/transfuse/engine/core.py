"""The engine as the front sees it: messages in, messages out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from transfuse.engine.engine import Engine, TokenOutput
from transfuse.engine.grammars import Compiled, Grammars
from transfuse.engine.request import Request
from transfuse.errors import (
    EngineError,
    PromptError,
    RequestError,
    StructuredOutputsError,
    TransfuseError,
    WrongTaskError,
)
from transfuse.messages import CoreStats, ModelLimits, NewPooling, NewRequest, RequestUpdate, StepReport
from transfuse.progress import ProgressCounter
from transfuse.sampling_params import MAX_SEED
from transfuse.structured_outputs import StructuredOutputsParams

log = logging.getLogger(__name__)

# How long a step with nothing else to do waits for a grammar.
_GRAMMAR_SECONDS = 0.01


class EngineCore:
    """Runs the requests that messages bring, and reports every step as a message.

    Args:
        engine: the step loop.
        limits: of the model; what is sent is checked again here, since a core outlives a front's mistakes.
        eos_token_ids: tokens that end a text.
        grammars: of the model's tokens; without, structured outputs are refused.
    """

    def __init__(
        self, engine: Engine, limits: ModelLimits, eos_token_ids: frozenset[int], grammars: Grammars | None = None
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._requests: dict[str, Request] = {}
        self._compiling: dict[str, Future[Compiled]] = {}  # of requests that are queued when it is there

    @property
    def engine(self) -> Engine:
        """The step loop, for its numbers."""
        return self._engine

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self._engine.has_unfinished or bool(self._compiling)

    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar now, for a caller who waits for it.

        Raises:
            StructuredOutputsError: it cannot be had.
        """
        self._grammar(params).result()

    def prepare_grammars(self) -> None:
        """Get ready for grammars on another thread, while there is nothing else to do."""
        if self._grammars is not None:
            self._grammars.prepare()

    def _grammar(self, params: StructuredOutputsParams) -> Future[Compiled]:
        if self._grammars is None:
            raise StructuredOutputsError("This engine has no tokenizer, and so no structured outputs. Leave them out.")
        return self._grammars.compile(params)

    def show_progress(self, counter: ProgressCounter) -> None:
        """Have `counter` bumped whenever a layer of the model begins to compute."""
        self._engine.runner.show_progress(counter)

    def add_text(self, new: NewPooling) -> None:
        """Refuse a text to pool.

        Raises:
            WrongTaskError: always.
        """
        raise WrongTaskError("This model generates text; it makes no vectors of texts.")

    def add(self, new: NewRequest) -> None:
        """Queue a request; one whose grammar is yet to be compiled as soon as it is.

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
        if new.params.structured_outputs is not None:
            grammar = self._grammar(new.params.structured_outputs)
            if not grammar.done():
                self._requests[new.request_id], self._compiling[new.request_id] = request, grammar
                return
            _set_grammar(request, grammar.result())
        self._engine.add(request)
        self._requests[new.request_id] = request

    def _check(self, new: NewRequest) -> None:
        if new.request_id in self._requests:
            raise RequestError(f"Request id {new.request_id!r} is in use by an unfinished request; choose another.")
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
        used = [*(new.params.stop_token_ids or ()), *(new.params.logit_bias or ())]
        used += (token for word in new.bad_words_token_ids for token in word)
        if not all(0 <= token < size for token in used):
            raise RequestError(f"A sampling field holds a token id beyond the vocabulary's {size}.")

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, whatever they are doing; unknown ids are fine."""
        for request_id in request_ids:
            self._compiling.pop(request_id, None)
            if self._requests.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def stop(self, request_id: str, stop_reason: str) -> None:
        """End a request at a stop string that its text came to; an unknown id is fine."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._engine.stop(request, stop_reason)

    def step(self) -> StepReport:
        """Compute one batch; a request that fails ends with `finish_reason` `error`, and others lose nothing."""
        refusals = self._queue_compiled()
        outputs = self._engine.step()
        for output in outputs:
            if output.request.finish_reason is not None:
                self._requests.pop(output.request.request_id, None)
        return StepReport([*refusals, *(_update(output) for output in outputs)], self.stats())

    def _queue_compiled(self) -> list[RequestUpdate]:
        """Queue what has its grammar now; the ends of those that cannot have it."""
        if self._compiling and not self._engine.has_unfinished:
            wait(self._compiling.values(), _GRAMMAR_SECONDS, FIRST_COMPLETED)
        refusals = []
        for request_id in [name for name, grammar in self._compiling.items() if grammar.done()]:
            request = self._requests[request_id]
            try:
                _set_grammar(request, self._compiling.pop(request_id).result())
                self._engine.add(request)
            except Exception as error:
                del self._requests[request_id]
                refusals.append(_refusal(request_id, error))
        return refusals

    def stats(self) -> CoreStats:
        """The numbers as they are now."""
        scheduler = self._engine.scheduler
        return CoreStats(
            num_steps=self._engine.num_steps,
            num_step_tokens=self._engine.num_step_tokens,
            num_step_prompt_tokens=self._engine.num_step_prompt_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            kv_cache_usage=scheduler.pool.num_referenced / scheduler.pool.num_total,
            prefix_cache_queries=scheduler.num_prefix_queries,
            prefix_cache_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Give back the model as it was, and end threads."""
        if self._grammars is not None:
            self._grammars.close()
        self._engine.close()


def _set_grammar(request: Request, compiled: Compiled) -> None:
    request.grammar, request.grammar_compile_seconds = compiled.grammar, compiled.seconds


def _refusal(request_id: str, error: Exception) -> RequestUpdate:
    if not isinstance(error, TransfuseError):
        log.error("request %s could not be queued", request_id, exc_info=error)
        error = EngineError(f"Request {request_id} could not be queued: {type(error).__name__}: {error}.")
    return RequestUpdate(request_id=request_id, finish_reason="error", error=error, finished_time=time.monotonic())


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
        is_complete=request.is_complete,
        error=request.error,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        grammar_compile_seconds=request.grammar_compile_seconds,
        grammar_mask_seconds=request.grammar_mask_seconds,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finished_time=request.finished_time,
    )
