"""The text side of a pooling model: texts in, vectors and scores out."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from transfuse.errors import TransfuseError
from transfuse.front.texts import ReadText, TextReader
from transfuse.messages import ModelLimits, NewPooling, RequestUpdate
from transfuse.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestMetrics,
    ScoringOutput,
    ScoringRequestOutput,
)
from transfuse.text.tokenizer import Tokenizer


class PoolingTarget(Protocol):
    """Where texts go: an engine in this process, or the connection to one in another."""

    def add_text(self, new: NewPooling) -> None:
        """Queue a text; an engine in this process raises `RequestError` where it can never be served."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are fine."""


class PoolingFront:
    """Sends texts and takes in what became of them.

    Attributes:
        texts: reads and checks texts.

    Args:
        core: where texts go.
        tokenizer: of the model.
        limits: of the model.
    """

    def __init__(self, core: PoolingTarget, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._core = core
        self.texts = TextReader(tokenizer, limits)
        self._running: dict[str, EmbeddingRequestOutput] = {}
        self._ids = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Texts that have not ended."""
        return len(self._running)

    def submit(
        self, text: ReadText, *, dimensions: int | None = None, priority: int = 0, arrival_time: float
    ) -> EmbeddingRequestOutput:
        """Queue a text and return what it becomes, which is filled in when that is known; a score is a vector of one.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self.texts.check_dimensions(dimensions)
        request_id = str(next(self._ids))
        output = EmbeddingRequestOutput(
            request_id, text.text, text.token_ids, metrics=RequestMetrics(arrival_time=arrival_time)
        )
        self._core.add_text(
            NewPooling(
                request_id=request_id,
                token_ids=text.token_ids,
                type_ids=text.type_ids,
                num_skipped=text.num_skipped,
                dimensions=dimensions,
                priority=priority,
                arrival_time=arrival_time,
            )
        )
        self._running[request_id] = output
        return output

    def take(self, updates: Iterable[RequestUpdate]) -> list[EmbeddingRequestOutput]:
        """Take in what a step brought and return the texts that have ended; those that were aborted are passed over."""
        ended = []
        for update in updates:
            output = self._running.pop(update.request_id, None)
            if output is not None:
                output.outputs, output.error, output.finished = EmbeddingOutput(update.pooled), update.error, True
                if output.metrics is not None:
                    output.metrics.first_scheduled_time = update.first_scheduled_time
                    output.metrics.finished_time = update.finished_time
                ended.append(output)
        return ended

    def abort(self, request_ids: Iterable[str]) -> None:
        """End texts; unknown ids are fine."""
        gone = [name for name in request_ids if self._running.pop(name, None) is not None]
        if gone:
            self._core.abort(gone)

    def abort_all(self) -> None:
        """End everything."""
        self.abort(list(self._running))

    def fail_all(self, error: TransfuseError) -> list[EmbeddingRequestOutput]:
        """End everything with an error, for a core that is gone."""
        lost = list(self._running.values())
        self._running.clear()
        for output in lost:
            output.error, output.finished = error, True
            if output.metrics is not None:
                output.metrics.finished_time = time.monotonic()
        return lost


class Scoring:
    """Pairs of texts on their way to scores: what has to be computed for them, and what they are made of.

    Args:
        texts: reads them.
        queries: texts to answer.
        documents: texts that may.
        pairs: which goes with which, by index.
        truncate: see `TextReader.read`.

    Attributes:
        needed: what the model has to read.

    Raises:
        RequestError: a text cannot be served.
    """

    def __init__(
        self,
        texts: TextReader,
        queries: Sequence[object],
        documents: Sequence[object],
        pairs: Sequence[tuple[int, int]],
        truncate: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._together = texts.pooling.task == "score"
        if self._together:
            self.needed = [texts.read_pair(queries[q], documents[d], truncate) for q, d in pairs]
        else:
            self.needed = [texts.read_role(text, "query", truncate) for text in queries]
            # It loads numpy, which most processes of a front do without.
            from transfuse.front.similarity import similarity

            self._compare = similarity(texts.pooling.similarity)
            self._num_queries = len(self.needed)
            self.needed += [texts.read_role(text, "document", truncate) for text in documents]

    def results(self, outputs: Sequence[EmbeddingRequestOutput]) -> list[ScoringRequestOutput]:
        """The scores, by pair, of what became of `needed`."""
        if self._together:
            return [self._result([output]) for output in outputs]
        return [self._result([outputs[q], outputs[self._num_queries + d]]) for q, d in self._pairs]

    def _result(self, outputs: Sequence[EmbeddingRequestOutput]) -> ScoringRequestOutput:
        error = next((output.error for output in outputs if output.error is not None), None)
        score = math.nan
        if error is None and self._together:
            (score,) = outputs[0].outputs.embedding
        elif error is None:
            score = self._compare(*(output.outputs.data for output in outputs))
        return ScoringRequestOutput(
            request_id="+".join(output.request_id for output in outputs),
            prompt_token_ids=[token for output in outputs for token in output.prompt_token_ids],
            outputs=ScoringOutput(score),
            metrics=max((o.metrics for o in outputs if o.metrics is not None), key=_end, default=None),
            error=error,
        )


def _end(metrics: RequestMetrics) -> float:
    return metrics.finished_time or 0.0
