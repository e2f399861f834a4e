"""Runs a model's own `generate`, one request at a time, stopped between tokens for the engine to sample."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from transfuse.cache.groups import CacheGroup
from transfuse.engine.runner import ModelRunner, PromptLogits, StepLogits
from transfuse.engine.scheduler import Batch
from transfuse.errors import EngineError


class OriginalRunner(ModelRunner):
    """See `ModelRunner`. Whatever `generate` runs, this runs, with the cache and the mask that `generate` gives it.

    `generate` is called once a request in a thread of its own. A logits processor hands each step's logits to the
    engine, waits for the token that the engine's sampler chose, and makes `generate` choose it too.

    Args:
        model: in eval mode.
    """

    implementation = "original"
    max_num_seqs = 1
    supports_chunks = False
    # The model's own cache grows with its request and is gone with it; blocks only count tokens here.
    groups = (CacheGroup(0, "full", None, (0,)),)

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._generation_config = model.generation_config
        model.generation_config = _neutral(model.generation_config)
        self._worker = _Worker(model)
        self._running: str | None = None

    def bytes_per_block(self, block_size: int) -> int:
        """Zero: the model's own cache is not made of blocks, and at most one exists at a time."""
        return 0

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """Nothing: `generate` makes its own cache."""
        return 0

    def run(self, batch: Batch) -> StepLogits:
        """See `ModelRunner.run`."""
        (entry,) = batch.entries
        request = entry.request
        if self._running == request.request_id and entry.start > 0:
            logits = self._worker.advance(request.output_token_ids[-1])
        else:
            self._worker.stop()
            self._running = request.request_id
            logits = self._worker.start(request.tokens(0, request.num_tokens))
        prompts = {}
        if request.params.prompt_logprobs is not None and entry.start == 0 and request.num_prompt_tokens > 1:
            prompts[request.request_id] = PromptLogits(1, self._prompt_logits(request.prompt_token_ids))
        return StepLogits(logits, (request,), prompts)

    @torch.inference_mode()
    def _prompt_logits(self, token_ids: list[int]) -> torch.Tensor:
        output = self._model(input_ids=torch.tensor([token_ids]), use_cache=False)
        logits: torch.Tensor = output.logits[0, :-1]
        return logits

    def release(self, request_id: str) -> None:
        """End the request's `generate`."""
        if self._running == request_id:
            self._worker.stop()
            self._running = None

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self._worker.close()
        self._model.generation_config = self._generation_config


def _neutral(config: GenerationConfig) -> GenerationConfig:
    """`config` without all that chooses or ends: greedy, no penalties, no stop tokens. The engine does these."""
    kept = {name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id")}
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, eos_token_id=None, **kept)


class _Stopped(BaseException):
    """Unwinds `generate` when the engine wants no more tokens. Not an `Exception`, so that no model catches it."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One `generate` and its queues: nobody reads what an interrupted one still puts there."""

    token_ids: list[int]
    logits: queue.SimpleQueue[torch.Tensor | Exception] = field(default_factory=queue.SimpleQueue)
    tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)


class _Bridge(LogitsProcessor):
    """Exchanges logits for a token, on the worker's thread."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._run.logits.put(scores.clone())
        token = self._run.tokens.get()
        if token is None:
            raise _Stopped
        forced = torch.full_like(scores, float("-inf"))
        forced[:, token] = 0.0
        return forced


class _Worker:
    """A thread that runs one `generate` at a time.

    It lives as long as the runner: every new thread that computes would start a pool of OpenMP threads of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._current: _Run | None = None
        self._thread = threading.Thread(target=self._serve, name="transfuse-original", daemon=True)
        self._thread.start()

    def start(self, token_ids: list[int]) -> torch.Tensor:
        """Begin a `generate` and return its first logits [1, V], float32."""
        run = self._current = _Run(token_ids)
        self._runs.put(run)
        return self._receive(run)

    def advance(self, token: int) -> torch.Tensor:
        """Go on with `token` and return the next logits [1, V], float32."""
        assert self._current is not None, "no generate is running"
        self._current.tokens.put(token)
        return self._receive(self._current)

    def stop(self) -> None:
        """End the running `generate`, if there is one."""
        if self._current is not None:
            self._current.tokens.put(None)
            self._current = None

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._runs.put(None)
        self._thread.join()

    def _receive(self, run: _Run) -> torch.Tensor:
        answer = run.logits.get()
        if isinstance(answer, Exception):
            self._current = None
            raise answer
        return answer

    def _serve(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._generate(run)
                raise EngineError("The model's generate ended by itself, before the engine had all tokens.")
            except _Stopped:
                continue
            except Exception as error:
                run.logits.put(error)

    @torch.inference_mode()
    def _generate(self, run: _Run) -> None:
        self._model.generate(
            torch.tensor([run.token_ids]),
            attention_mask=torch.ones(1, len(run.token_ids), dtype=torch.int64),
            logits_processor=LogitsProcessorList([_Bridge(run)]),
            # The engine ends the request; generate must not end before it.
            max_new_tokens=2**31 - 1,
        )
