"""A model's own `generate` on a batch of prompts, stopped between tokens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from transfuse.errors import EngineError


class _Stopped(BaseException):
    """Unwinds `generate` when the engine wants no more tokens. Not an `Exception`, so that no model catches it."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One `generate` and its queues: nobody reads what an interrupted one still puts there."""

    prompts: Sequence[Sequence[int]]
    logits: queue.SimpleQueue[torch.Tensor | Exception] = field(default_factory=queue.SimpleQueue)
    tokens: queue.SimpleQueue[Sequence[int] | None] = field(default_factory=queue.SimpleQueue)


class _Bridge(LogitsProcessor):
    """Exchanges logits for tokens, on the worker's thread."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._run.logits.put(scores.clone())
        tokens = self._run.tokens.get()
        if tokens is None:
            raise _Stopped
        forced = torch.full_like(scores, float("-inf"))
        forced[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
        return forced


class OwnGenerate:
    """A thread that runs one `generate` at a time.

    It lives as long as its owner: every new thread that computes would start a pool of OpenMP threads of its own.

    Args:
        model: in eval mode, with a generation config that neither chooses nor ends.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._current: _Run | None = None
        self._thread = threading.Thread(target=self._serve, name="transfuse-original", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether a `generate` has begun and not ended."""
        return self._current is not None

    def start(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Begin a `generate`, shorter prompts padded at their left, and return its first logits [B, V], float32."""
        run = self._current = _Run(prompts)
        self._runs.put(run)
        return self._receive(run)

    def advance(self, tokens: Sequence[int]) -> torch.Tensor:
        """Go on with a token for each prompt and return the next logits [B, V], float32."""
        assert self._current is not None, "no generate is running"
        self._current.tokens.put(tokens)
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
        longest = max(map(len, run.prompts))
        pad = self._model.generation_config.pad_token_id
        padding = pad if isinstance(pad, int) and pad >= 0 else 0
        lacking = [longest - len(prompt) for prompt in run.prompts]
        rows = [[padding] * count + list(prompt) for count, prompt in zip(lacking, run.prompts, strict=True)]
        masks = [[0] * count + [1] * (longest - count) for count in lacking]
        self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(masks),
            logits_processor=LogitsProcessorList([_Bridge(run)]),
            # The engine ends the requests; generate must not end before it.
            max_new_tokens=2**31 - 1,
        )
