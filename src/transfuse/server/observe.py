"""Watches answers on their way through: counts tokens, times their gaps, and keeps what the request's log line says."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from transfuse.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from transfuse.server.metrics import Metrics


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request: never its text, its prompt or its key.

    The outermost middleware makes it, as `request.state.record`, and writes it to the log when the response has ended.

    Attributes:
        metrics: where numbers go.
        request_id: the client's `X-Request-Id`, or a new one.
        start_time: seconds of the monotonic clock.
        streamed: whether the answer is sent as it grows; None where nothing was generated.
        num_prompt_tokens: of all prompts of the request.
        num_output_tokens: of all continuations.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        finish_reasons: of the continuations that ended.
        queue_seconds: from arrival to the first step; the longest, where there are several prompts.
        ttft_seconds: from arrival to the first token; the longest.
        error: class of what ended a generation early.
    """

    metrics: Metrics
    request_id: str
    start_time: float
    streamed: bool | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take in an answer that has ended."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        self.num_cached_tokens += output.num_cached_tokens
        self.finish_reasons += [one.finish_reason or "abort" for one in output.outputs]
        if output.error is not None:
            self.error = type(output.error).__name__
        if (times := output.metrics) is not None:
            self.queue_seconds = _longest(self.queue_seconds, times.queue_seconds)
            self.ttft_seconds = _longest(self.ttft_seconds, times.ttft_seconds)

    def add_texts(self, outputs: Sequence[EmbeddingRequestOutput | ScoringRequestOutput]) -> None:
        """Take in texts that a vector or a score was made of."""
        for output in outputs:
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.finish_reasons.append("stop")
            if (times := output.metrics) is not None:
                self.queue_seconds = _longest(self.queue_seconds, times.queue_seconds)
            self.metrics.observe_text(output)

    def facts(self) -> dict[str, Any]:
        """What the log line says of the generation, if there was one, and of what went wrong."""
        if self.streamed is None:
            return {"error": self.error}
        return {
            "streamed": self.streamed,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "cached_tokens": self.num_cached_tokens,
            "finish_reasons": ",".join(sorted(set(self.finish_reasons))),
            "queue_ms": _milliseconds(self.queue_seconds),
            "ttft_ms": _milliseconds(self.ttft_seconds),
            "error": self.error,
        }


async def observed(
    outputs: AsyncGenerator[RequestOutput, None], *, record: RequestRecord, stream: bool
) -> AsyncGenerator[RequestOutput, None]:
    """Passes answers on as they grow, and records them.

    Closing it closes `outputs`, which aborts the request.

    Args:
        outputs: what `AsyncLLM.generate` or `chat` returned.
        record: `request.state.record`.
        stream: whether the client sees the answer grow.
    """
    record.streamed = stream
    metrics = record.metrics
    output: RequestOutput | None = None
    num_tokens = 0
    last_time: float | None = None
    try:
        async with aclosing(outputs):
            async for output in outputs:
                grown = sum(len(one.token_ids) for one in output.outputs)
                if grown > num_tokens:
                    now = time.monotonic()
                    if last_time is not None:
                        metrics.observe_token_gap(now - last_time)
                    metrics.count_output_tokens(grown - num_tokens)
                    num_tokens, last_time = grown, now
                yield output
    except Exception as error:
        record.error = type(error).__name__
        raise
    finally:
        if output is not None:
            record.add(output)
            metrics.observe(output)


def _longest(so_far: float | None, seconds: float | None) -> float | None:
    return so_far if seconds is None else max(so_far or 0.0, seconds)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
