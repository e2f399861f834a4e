"""The text side of the engine: prompts in, text out, `n` continuations gathered into one answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transfuse.engine.detokenizer import IncrementalDetokenizer
from transfuse.engine.engine import Engine, TokenOutput
from transfuse.engine.request import Request
from transfuse.engine.sampler import SampledToken
from transfuse.errors import CapacityError, PromptError, RequestError, SamplingParamsError, UnsupportedModelError
from transfuse.models.tokenizer import Tokenizer
from transfuse.outputs import CompletionOutput, Logprob, LogprobsAtPosition, RequestMetrics, RequestOutput
from transfuse.sampling_params import MAX_N, SamplingParams

Prompt = str | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a text.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class _Continuation:
    """One of the `n` continuations of a prompt."""

    request: Request
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None


@dataclass(slots=True)
class _Group:
    """A prompt with its continuations."""

    output: RequestOutput
    continuations: dict[str, _Continuation] = field(default_factory=dict)


class Front:
    """Owns text: tokenises, checks and fans out requests; detokenises and finds stop strings on the way back.

    Args:
        engine: where requests go.
        tokenizer: of the model.
        limits: of the model.
        seed: makes requests without a seed of their own repeatable; None leaves them random.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: ModelLimits, seed: int | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        # The continuations of a prompt take the seeds that follow its own: no two prompts may share one.
        self._seeds = None if seed is None else itertools.count(seed, MAX_N)
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._ids = itertools.count()

    def tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it has one, and its token ids.

        Raises:
            PromptError: it is neither text nor `{"prompt": text}` nor `{"prompt_token_ids": ids}`, it is empty, or
                an id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            return prompt, self._checked(self._tokenizer.encode(prompt))
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"], self._checked(self._tokenizer.encode(prompt["prompt"]))
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            return None, self._checked(prompt["prompt_token_ids"])
        given = f"keys {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else type(prompt).__name__
        raise PromptError(f'A prompt is text, {{"prompt": text}} or {{"prompt_token_ids": [ids]}}; got {given}.')

    def _checked(self, ids: object) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise PromptError(f"prompt_token_ids is a {type(ids).__name__}; expected a list of token ids.")
        size = self._limits.vocab_size
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                shown = token if not isinstance(token, int) or abs(token) < 10**30 else "a huge integer"
                raise PromptError(f"prompt token {index} is {shown!r}; expected an id from 0 to {size - 1}.")
        if not ids:
            raise PromptError("The prompt has no tokens; give at least one.")
        return list(ids)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what can be known to be wrong before any work.

        Raises:
            CapacityError: the prompt leaves no room for a token.
            RequestError: `params` is no `SamplingParams`.
            SamplingParamsError: an id is outside the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"The sampling parameters are a {type(params).__name__}; give a SamplingParams.")
        most = self._limits.max_model_len - 1
        if len(prompt_token_ids) > most:
            raise CapacityError(
                f"The prompt has {len(prompt_token_ids)} tokens; at most {most} fit into "
                f"max_model_len={self._limits.max_model_len}, since an answer takes one or more. Shorten the prompt or "
                "raise max_model_len."
            )
        size = self._limits.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids or ()), ("logit_bias", params.logit_bias or {})):
            for token in ids:
                if token >= size:
                    raise SamplingParamsError(name, token, f"token ids below the vocabulary's {size}")

    def submit(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float,
    ) -> str:
        """Queue a prompt and return its request id.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self.check(prompt_token_ids, params)
        request_id = str(next(self._ids))
        room = self._limits.max_model_len - len(prompt_token_ids)
        output = RequestOutput(request_id, prompt, prompt_token_ids, [], metrics=RequestMetrics(arrival_time))
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        group = _Group(output)
        bad_words = self._bad_words(params)
        seed = next(self._seeds) if params.seed is None and self._seeds is not None else params.seed
        for index in range(params.n):
            request = Request(
                request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                # The prompt is the same for all, and so are its log-probabilities.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=self._limits.eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time=arrival_time,
                # Continuations of one seed differ, and are the same whatever their number.
                seed=None if seed is None else (seed + index) % 2**63,
            )
            completion = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
            group.continuations[request.request_id] = _Continuation(request, completion, self._detokenizer(request))
            output.outputs.append(completion)
        self._queue(group)
        return request_id

    def _queue(self, group: _Group) -> None:
        queued: list[str] = []
        try:
            for request_id, continuation in group.continuations.items():
                self._engine.add(continuation.request)
                queued.append(request_id)
        except Exception:
            for request_id in queued:
                self._engine.abort(request_id)
            raise
        self._groups[group.output.request_id] = group
        self._group_of.update(dict.fromkeys(queued, group))

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
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
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as tokens, as it stands at the start of a text and after a space."""
        found = {
            tuple(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)): None
            for word in params.bad_words or ()
            for prefix in ("", " ")
        }
        return tuple(ids for ids in found if ids)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine and return the answers that it changed, those that it ended among them.

        An answer is one object from its first token to its end; copy what must not change.
        """
        changed: dict[str, _Group] = {}
        for token_output in self._engine.step():
            group = self._group_of.get(token_output.request.request_id)
            if group is not None:
                self._take(group, token_output)
                changed[group.output.request_id] = group
        for group in changed.values():
            self._close_if_finished(group)
        return [group.output for group in changed.values()]

    def _take(self, group: _Group, step: TokenOutput) -> None:
        request = step.request
        continuation = group.continuations[request.request_id]
        known = group.output.prompt_logprobs
        if known is not None and step.prompt_logprobs:
            # A preempted request computes its prompt again; what is known stays.
            new = step.prompt_logprobs[len(known) - step.first_target :]
            known.extend(self._with_text(position, request) for position in new)
        if step.token is not None:
            self._add_token(continuation, step.token)
        if request.finish_reason is not None:
            self._end(group, continuation)

    def _add_token(self, continuation: _Continuation, token: SampledToken) -> None:
        completion = continuation.completion
        completion.token_ids.append(token.token_id)
        if token.top is not None and completion.logprobs is not None:
            completion.logprobs.append(self._with_text(token.top, continuation.request))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + (token.logprob or 0.0)
        request = continuation.request
        # A token that ends the text is not part of it.
        if continuation.detokenizer is None or request.finish_reason == "stop":
            return
        delta = continuation.detokenizer.append(token.token_id)
        completion.text += delta.text
        if delta.stop is not None and request.finish_reason is None:
            self._engine.stop(request, delta.stop)
        if delta.stop is not None:
            request.finish_reason, request.stop_reason = "stop", delta.stop

    def _end(self, group: _Group, continuation: _Continuation) -> None:
        request, completion = continuation.request, continuation.completion
        if continuation.detokenizer is not None and continuation.detokenizer.stop is None:
            delta = continuation.detokenizer.finish()
            completion.text += delta.text
            if delta.stop is not None:
                request.finish_reason, request.stop_reason = "stop", delta.stop
        completion.finish_reason, completion.stop_reason = request.finish_reason, request.stop_reason
        if request.error is not None:
            group.output.error = request.error

    def _close_if_finished(self, group: _Group) -> None:
        requests = [c.request for c in group.continuations.values()]
        metrics = group.output.metrics
        assert metrics is not None
        metrics.first_scheduled_time = _earliest(r.first_scheduled_time for r in requests)
        metrics.first_token_time = _earliest(r.first_token_time for r in requests)
        metrics.num_preemptions = sum(r.num_preemptions for r in requests)
        group.output.num_cached_tokens = requests[0].num_cached_tokens
        if all(c.completion.finish_reason is not None for c in group.continuations.values()):
            metrics.finished_time = max(r.finished_time or 0.0 for r in requests)
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
        for continuation in group.continuations.values():
            if continuation.completion.finish_reason is None:
                self._engine.abort(continuation.request.request_id)
                self._end(group, continuation)
        self._close_if_finished(group)
        return group.output

    def abort_all(self) -> None:
        """End everything."""
        for request_id in list(self._groups):
            self.abort(request_id)

    def _with_text(self, position: LogprobsAtPosition, request: Request) -> LogprobsAtPosition:
        if not request.params.detokenize:
            return position
        return {
            token: Logprob(found.logprob, found.rank, self._tokenizer.convert_ids_to_token_text(token))
            for token, found in position.items()
        }


def _earliest(times: Iterable[float | None]) -> float | None:
    earliest = min((t for t in times if t is not None), default=math.inf)
    return None if earliest == math.inf else earliest
