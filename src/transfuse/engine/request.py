"""One sequence on its way through the engine, from its prompt to its last token."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transfuse.errors import TransfuseError
from transfuse.outputs import FinishReason
from transfuse.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transfuse.text.grammar import Grammar


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence; `n` continuations of a prompt are `n` requests.

    The caller fills the fields up to `grammar_compile_seconds`. The scheduler owns the others.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: the prompt; not empty.
        params: how to sample.
        max_tokens: most tokens to generate, resolved against the context; at least 1.
        eos_token_ids: the model's end-of-sequence tokens.
        bad_words_token_ids: token sequences that may not be generated.
        priority: lower is served first under the `priority` policy.
        arrival_time: seconds of a monotonic clock.
        salt: requests with different salts never share cache blocks.
        seed: makes the draws repeatable; None: unseeded.
        grammar: what the output is a sentence of; None: any.
        grammar_compile_seconds: what compiling that took, now or for an earlier request.
        output_token_ids: what was generated so far.
        num_computed_tokens: leading tokens whose keys and values are in the cache.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        num_preemptions: how often its blocks were taken away, to be computed again later.
        grammar_mask_seconds: what masks by its grammar have taken so far.
        status: waiting, running or finished.
        finish_reason: why it ended.
        stop_reason: the stop string or stop token id that ended it.
        is_complete: whether its last token completed its grammar, and is part of the text.
        error: what ended it, where `finish_reason` is `error`.
        first_scheduled_time: when it first entered a step.
        first_token_time: when its first token was sampled.
        finished_time: when it ended.
        block_ids: per cache group, the block of each `block_size` positions; 0 where a sliding window has passed.
        state_row: its row of the state cache while it runs; None otherwise, or where the model keeps no states.
        isolate: whether it runs in steps of its own, because a step that it was in failed.
        rank: the scheduler's order; lower goes first.
        block_digests: prefix digests of its full blocks, as far as they were needed.
        num_published_blocks: leading blocks that the prefix cache was told of, or that came from it.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    params: SamplingParams = field(repr=False)
    max_tokens: int
    eos_token_ids: frozenset[int] = field(default=frozenset(), repr=False)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    priority: int = 0
    arrival_time: float
    salt: bytes = field(default=b"", repr=False)
    seed: int | None = None
    grammar: Grammar | None = field(default=None, repr=False)
    grammar_compile_seconds: float = 0.0

    output_token_ids: list[int] = field(default_factory=list, repr=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    grammar_mask_seconds: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_complete: bool = False
    error: TransfuseError | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    block_ids: list[list[int]] = field(default_factory=list, repr=False)
    state_row: int | None = None
    isolate: bool = False
    rank: tuple[int, int] = (0, 0)
    block_digests: list[bytes] = field(default_factory=list, repr=False)
    num_published_blocks: int = field(default=0, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    def token_at(self, position: int) -> int:
        """The token at a position of prompt + output."""
        offset = position - len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if offset < 0 else self.output_token_ids[offset]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions `start .. stop - 1` of prompt + output."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - split]

    def append(self, token_id: int, *, completes: bool = False) -> None:
        """Adds a sampled token and, where it ends the sequence, sets `finish_reason` and `stop_reason`.

        Args:
            token_id: the token.
            completes: whether the grammar has no token after it.
        """
        self.output_token_ids.append(token_id)
        if completes:
            self.finish_reason, self.is_complete = "stop", token_id not in self.eos_token_ids
            return
        num_output = len(self.output_token_ids)
        if num_output > self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
                return
            if token_id in (self.params.stop_token_ids or ()):
                self.finish_reason, self.stop_reason = "stop", token_id
                return
        if num_output >= self.max_tokens:
            self.finish_reason = "length"
