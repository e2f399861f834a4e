"""Calls of many callers to a pooling model in another process: texts out, vectors and scores back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from transfuse.front.pooling import PoolingFront, Scoring
from transfuse.front.prompts import Prompt
from transfuse.front.texts import ReadText, pair_up
from transfuse.outputs import EmbeddingRequestOutput, ScoringRequestOutput

# Texts of one call that are with the engine at once, where the caller does not say.
_AT_ONCE = 256


class PoolingCalls:
    """Waits for texts on behalf of callers; all methods belong to one event loop.

    Args:
        require_front: gives the way to the engine, or raises what stands against it.
    """

    def __init__(self, require_front: Callable[[], PoolingFront]) -> None:
        self._require_front = require_front
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        truncate: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        at_once: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of texts, in order; see `AsyncLLM.embed`."""
        texts = self._require_front().texts
        texts.check_dimensions(dimensions)

        def read() -> list[ReadText]:
            return [texts.read(prompt, prompt_name=prompt_name, truncate=truncate) for prompt in prompts]

        return await self._run(await asyncio.to_thread(read), dimensions, priority, at_once)

    async def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate: int | None = None,
        priority: int = 0,
        at_once: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well documents answer queries; see `AsyncLLM.score`."""
        texts = self._require_front().texts
        pairs = pair_up(queries, documents)
        scoring = await asyncio.to_thread(Scoring, texts, queries, documents, pairs, truncate)
        outputs = await self._run(scoring.needed, None, priority, at_once)
        return await asyncio.to_thread(scoring.results, outputs)

    async def _run(
        self, texts: Sequence[ReadText], dimensions: int | None, priority: int, at_once: int | None
    ) -> list[EmbeddingRequestOutput]:
        """Have texts computed, and raise the first error; nothing of them runs on when this ends."""
        front, arrival = self._require_front(), time.monotonic()
        outputs: list[EmbeddingRequestOutput] = []
        under_way: deque[EmbeddingRequestOutput] = deque()
        try:
            for text in texts:
                while len(under_way) >= (at_once or _AT_ONCE):
                    await self._ended(under_way.popleft())
                output = front.submit(text, dimensions=dimensions, priority=priority, arrival_time=arrival)
                self._waiting[output.request_id] = asyncio.get_running_loop().create_future()
                outputs.append(output)
                under_way.append(output)
            for output in under_way:
                await self._ended(output)
        finally:
            for output in outputs:
                self._waiting.pop(output.request_id, None)
            front.abort(output.request_id for output in outputs)
        return outputs

    async def _ended(self, output: EmbeddingRequestOutput) -> None:
        if not output.finished:
            await self._waiting[output.request_id]
        if output.error is not None:
            raise output.error

    def wake(self, ended: Iterable[EmbeddingRequestOutput]) -> None:
        """Tell those who wait that these texts have ended."""
        for output in ended:
            future = self._waiting.get(output.request_id)
            if future is not None and not future.done():
                future.set_result(None)
