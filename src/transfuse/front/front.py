"""The text side: prompts in, text out, `n` continuations gathered into one answer."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from transfuse.errors import EngineError, RequestError, TransfuseError, UnsupportedModelError
from transfuse.explanation import Implementation, Terms
from transfuse.front.prompts import PromptReader
from transfuse.messages import ModelLimits, NewRequest, RequestUpdate
from transfuse.outputs import CompletionOutput, FinishReason, Logprob, LogprobsAtPosition, RequestMetrics, RequestOutput
from transfuse.sampling_params import MAX_N, SamplingParams
from transfuse.text.detokenizer import IncrementalDetokenizer
from transfuse.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Core(Protocol):
    """Where requests go: an engine in this process, or the connection to one in another."""

    def add(self, new: NewRequest) -> None:
        """Queue a request; a core in this process raises `RequestError` where it can never be served."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are fine."""

    def stop(self, request_id: str, stop_reason: str) -> None:
        """End a request at a stop string; an unknown id is fine."""


@dataclass(slots=True)
class _Continuation:
    """One of the `n` continuations of a prompt."""

    request: NewRequest
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    update: RequestUpdate | None = None  # the last one, for its numbers
    finished_time: float | None = None

    @property
    def ended(self) -> bool:
        return self.completion.finish_reason is not None


@dataclass(slots=True)
class _Group:
    """A prompt with its continuations."""

    output: RequestOutput
    continuations: dict[str, _Continuation] = field(default_factory=dict)


class Front:
    """Owns text: fans out requests; detokenises and finds stop strings on the way back.

    Attributes:
        prompts: reads and checks prompts.
        implementation: how the model is run, for those who ask; None where nobody said.

    Args:
        core: where requests go.
        tokenizer: of the model.
        limits: of the model.
        seed: makes requests without a seed of their own repeatable; None leaves them random.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer, limits: ModelLimits, seed: int | None = None) -> None:
        self.implementation: Implementation | None = None
        self._core = core
        self.prompts = PromptReader(tokenizer, limits)
        self._tokenizer = tokenizer
        self._limits = limits
        # The continuations of a prompt take the seeds that follow its own: no two prompts may share one.
        self._seeds = None if seed is None else itertools.count(seed, MAX_N)
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._ids = itertools.count()
        # What the core still says of an aborted request must never be taken for another's of the same name.
        self._serials = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Continuations that have not ended."""
        return len(self._group_of)

    def submit(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        arrival_time: float,
    ) -> RequestOutput:
        """Queue a prompt and return its answer, which grows as updates are taken in.

        Args:
            prompt: its text, if it has one.
            prompt_token_ids: the prompt.
            params: how to sample.
            request_id: unique among unfinished prompts; None makes one.
            priority: lower is served first under the `priority` policy.
            salt: prompts with different salts never share cache blocks.
            arrival_time: seconds of the monotonic clock.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self.prompts.check(prompt_token_ids, params)
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if name not in self._groups)
        if request_id in self._groups:
            raise RequestError(f"Request id {request_id!r} is in use by an unfinished request; choose another.")
        terms = self._terms(prompt_token_ids, params)
        metrics = RequestMetrics(arrival_time)
        output = RequestOutput(request_id, prompt, prompt_token_ids, [], metrics=metrics, terms=terms)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        group = _Group(output)
        for request in self._fan_out(request_id, prompt_token_ids, terms, priority, salt, arrival_time):
            completion = CompletionOutput(len(output.outputs), logprobs=None if params.logprobs is None else [])
            group.continuations[request.request_id] = _Continuation(request, completion, self._detokenizer(request))
            output.outputs.append(completion)
        self._queue(group)
        return output

    def _terms(self, prompt_token_ids: list[int], params: SamplingParams) -> Terms:
        longest = self._limits.max_model_len
        room = longest - len(prompt_token_ids)
        return Terms(
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            max_model_len=longest,
            seed=next(self._seeds) if params.seed is None and self._seeds is not None else params.seed,
            implementation=self.implementation,
        )

    def _fan_out(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        terms: Terms,
        priority: int,
        salt: bytes,
        arrival_time: float,
    ) -> Iterable[NewRequest]:
        params, seed = terms.params, terms.seed
        bad_words = self._bad_words(params)
        for index in range(params.n):
            yield NewRequest(
                request_id=f"{request_id}#{next(self._serials)}",
                prompt_token_ids=prompt_token_ids,
                # The prompt is the same for all, and so are its log-probabilities.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                max_tokens=terms.max_tokens,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time=arrival_time,
                salt=salt,
                # Continuations of one seed differ, and are the same whatever their number.
                seed=None if seed is None else (seed + index) % 2**63,
            )

    def _queue(self, group: _Group) -> None:
        queued: list[str] = []
        try:
            for request_id, continuation in group.continuations.items():
                self._core.add(continuation.request)
                queued.append(request_id)
        except Exception:
            self._core.abort(queued)
            raise
        self._groups[group.output.request_id] = group
        self._group_of.update(dict.fromkeys(queued, group))

    def _detokenizer(self, request: NewRequest) -> IncrementalDetokenizer | None:
        params = request.params
        if not params.detokenize:
            return None
        if self._tokenizer.backend is None:
            raise UnsupportedModelError(
                "This model's tokenizer is Python code, which cannot be decoded token by token. Set detokenize=False "
                "and decode the token ids yourself."
            )
        return IncrementalDetokenizer(
            self._tokenizer.backend,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens and not params.keep_special_tokens,
            hidden=self._hidden_tokens(params),
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            stands_alone=params.structured_outputs is not None,
        )

    def _hidden_tokens(self, params: SamplingParams) -> frozenset[int]:
        """The special tokens that are left out, where some are kept."""
        if not (params.skip_special_tokens and params.keep_special_tokens):
            return frozenset()
        special = self._tokenizer.special_tokens
        return frozenset(special.values()) - {special.get(text) for text in params.keep_special_tokens}

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as tokens, as it stands at the start of a text and after a space."""
        found = {
            tuple(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)): None
            for word in params.bad_words or ()
            for prefix in ("", " ")
        }
        # What the model has no token for it cannot generate.
        return tuple(ids for ids in found if ids and max(ids) < self._limits.vocab_size)

    def take(self, updates: Iterable[RequestUpdate]) -> list[RequestOutput]:
        """Take in what a step brought and return the answers that it changed, those that it ended among them.

        An answer is one object from its first token to its end; copy what must not change. Updates of requests that
        have ended here, such as tokens that were computed past a stop string, are dropped.
        """
        changed: dict[str, _Group] = {}
        for update in updates:
            group = self._group_of.get(update.request_id)
            if group is not None and not group.continuations[update.request_id].ended:
                try:
                    self._take(group, update)
                except Exception as error:
                    self._fail(group, update, error)
                changed[group.output.request_id] = group
        for group in changed.values():
            self._close_if_finished(group)
        return [group.output for group in changed.values()]

    def _fail(self, group: _Group, update: RequestUpdate, error: Exception) -> None:
        """End a continuation whose tokens could not be made text of; those of others in the same step go on."""
        log.error("request %s: its tokens cannot be made text of", update.request_id, exc_info=error)
        continuation = group.continuations[update.request_id]
        continuation.detokenizer = None
        if update.finish_reason is None:
            self._core.abort([update.request_id])
        self._end(continuation, "error")
        group.output.error = EngineError(f"The tokens of request {update.request_id} cannot be made text of: {error!r}")

    def _take(self, group: _Group, update: RequestUpdate) -> None:
        continuation = group.continuations[update.request_id]
        continuation.update = update
        known = group.output.prompt_logprobs
        if known is not None and update.prompt_logprobs:
            # A preempted request computes its prompt again; what is known stays.
            new = update.prompt_logprobs[len(known) - update.first_target :]
            detokenize = continuation.request.params.detokenize
            known.extend(self._with_text(position, detokenize) for position in new)
        for index in range(len(update.token_ids)):
            self._add_token(continuation, update, index)
            if continuation.ended:
                return
        if update.finish_reason is not None:
            self._end(continuation, update.finish_reason, update.stop_reason)
            continuation.finished_time = update.finished_time
            if update.error is not None:
                group.output.error = update.error

    def _add_token(self, continuation: _Continuation, update: RequestUpdate, index: int) -> None:
        token, completion = update.token_ids[index], continuation.completion
        completion.token_ids.append(token)
        if update.logprobs is not None and completion.logprobs is not None:
            position = update.logprobs[index]
            completion.logprobs.append(self._with_text(position, continuation.request.params.detokenize))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + position[token].logprob
        if continuation.detokenizer is None:
            return
        # A token that ends the text is not part of it, unless it completes what was asked for.
        ends_text = update.finish_reason == "stop" and not update.is_complete
        if ends_text and index == len(update.token_ids) - 1:
            completion.text_ends.append(len(completion.text))
            return
        delta = continuation.detokenizer.append(token)
        completion.text += delta.text
        completion.text_ends.append(len(completion.text))
        if delta.stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", delta.stop
            continuation.finished_time = time.monotonic()
            if update.finish_reason is None:
                self._core.stop(continuation.request.request_id, delta.stop)

    def _end(self, continuation: _Continuation, reason: FinishReason, stop_reason: int | None = None) -> None:
        completion = continuation.completion
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        continuation.finished_time = time.monotonic()
        if continuation.detokenizer is not None:
            delta = continuation.detokenizer.finish()
            completion.text += delta.text
            if delta.stop is not None:
                completion.finish_reason, completion.stop_reason = "stop", delta.stop

    def _close_if_finished(self, group: _Group) -> None:
        continuations = group.continuations.values()
        updates = [c.update for c in continuations if c.update is not None]
        metrics = group.output.metrics
        assert metrics is not None
        metrics.first_scheduled_time = _earliest(u.first_scheduled_time for u in updates)
        metrics.first_token_time = _earliest(u.first_token_time for u in updates)
        metrics.num_preemptions = sum(u.num_preemptions for u in updates)
        metrics.grammar_compile_seconds = max((u.grammar_compile_seconds for u in updates), default=0.0)
        metrics.grammar_mask_seconds = sum(u.grammar_mask_seconds for u in updates)
        if (first := next(iter(continuations)).update) is not None:
            group.output.num_cached_tokens = first.num_cached_tokens
        if all(c.ended for c in continuations):
            metrics.finished_time = max(c.finished_time or 0.0 for c in continuations)
            group.output.finished = True
            self._forget(group)

    def _forget(self, group: _Group) -> None:
        del self._groups[group.output.request_id]
        for request_id in group.continuations:
            del self._group_of[request_id]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt's continuations with finish reason `abort`; None where the id is unknown or has ended."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        running = [name for name, continuation in group.continuations.items() if not continuation.ended]
        self._core.abort(running)
        for name in running:
            self._end(group.continuations[name], "abort")
        self._close_if_finished(group)
        return group.output

    def abort_all(self) -> None:
        """End everything."""
        for request_id in list(self._groups):
            self.abort(request_id)

    def fail_all(self, error: TransfuseError) -> list[RequestOutput]:
        """End everything with an error, for a core that is gone; the answers."""
        groups = list(self._groups.values())
        for group in groups:
            group.output.error = error
            for continuation in group.continuations.values():
                if not continuation.ended:
                    self._end(continuation, "error")
            self._close_if_finished(group)
        return [group.output for group in groups]

    def _with_text(self, position: LogprobsAtPosition, detokenize: bool) -> LogprobsAtPosition:
        if not detokenize:
            return position
        return {
            token: Logprob(found.logprob, found.rank, self._tokenizer.convert_ids_to_token_text(token))
            for token, found in position.items()
        }


def _earliest(times: Iterable[float | None]) -> float | None:
    earliest = min((t for t in times if t is not None), default=math.inf)
    return None if earliest == math.inf else earliest
