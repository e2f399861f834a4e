"""An engine in this process, stepped by hand, so that each token's time is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transfuse.bench.requests import BenchRequest
from transfuse.bench.timing import Timing
from transfuse.config import EngineConfig, shorten_thread_waits
from transfuse.errors import CapacityError
from transfuse.models.resolve import ModelSource, resolve_model
from transfuse.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transfuse.engine.build import Summary
    from transfuse.engine.engine import Engine


class OfflineEngine:
    """A model that runs requests to their ends, as `LLM` does, and notes when each token came.

    Args:
        config: of the engine.
        show_progress: whether loading shows a progress bar.

    Raises:
        ModelError: the model cannot be found, loaded or run.
        ConfigError: settings contradict each other, the model or the memory.
    """

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.config = config
        self.source = find_model(config)
        shorten_thread_waits()
        from transfuse.engine.build import build_engine
        from transfuse.front.front import Front

        self._built = build_engine(config, self.source, show_progress=show_progress)
        # As LLM does, which is what is to be measured.
        gc.collect()
        gc.freeze()
        self._front = Front(self._built.core, self._built.tokenizer, self._built.limits, config.seed)

    @property
    def summary(self) -> Summary:
        """What a start-up table shows."""
        return self._built.summary

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._built.limits.vocab_size

    @property
    def engine(self) -> Engine:
        """The step loop, for those who look on."""
        return self._built.core.engine

    def check(self, num_tokens: int) -> None:
        """Make sure that requests of this many tokens, prompt and answer together, are not cut off.

        Raises:
            CapacityError: they would be.
        """
        limit = self._built.limits.max_model_len
        if num_tokens > limit:
            raise CapacityError(
                f"A request of {num_tokens} tokens, prompt and answer together, is longer than this engine's {limit}. "
                "Take shorter ones, or raise --max-model-len as far as the model and the memory allow."
            )

    def run(self, requests: Sequence[BenchRequest]) -> list[Timing]:
        """Run requests that are all sent at once, greedily and past ends of text; their timings, in order.

        Raises:
            RequestError: one can never be served.
            EngineError: one failed in the model.
        """
        timings: dict[str, Timing] = {}
        try:
            for request in requests:
                request_id, timing = self._send(request)
                timings[request_id] = timing
            while self._front.num_unfinished:
                self._step(timings)
        finally:
            self._front.abort_all()
        return list(timings.values())

    def _send(self, request: BenchRequest) -> tuple[str, Timing]:
        text, ids = self._front.prompts.tokenise(
            request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
        )
        self.check(len(ids) + request.max_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
        timing = Timing(sent=time.perf_counter(), num_prompt_tokens=len(ids))
        output = self._front.submit(text, ids, params, arrival_time=time.monotonic())
        return output.request_id, timing

    def _step(self, timings: dict[str, Timing]) -> None:
        outputs = self._front.take(self._built.core.step().updates)
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
            timing, num_tokens = timings[output.request_id], len(output.outputs[0].token_ids)
            if num_tokens > timing.num_output_tokens:
                timing.chunks.append(now)
                timing.num_output_tokens = num_tokens
            timing.num_cached_tokens = output.num_cached_tokens
            if output.finished:
                timing.ended = now

    def close(self) -> None:
        """Free the model and end its threads."""
        self._built.core.close()
        gc.unfreeze()

    def __enter__(self) -> OfflineEngine:
        """The engine itself; `close` is called at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def find_model(config: EngineConfig) -> ModelSource:
    """The model that a configuration names.

    Raises:
        ModelError: there is none, or it brings code that may not run.
    """
    return resolve_model(
        config.model.model,
        cache_dir=config.model.cache_dir,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
