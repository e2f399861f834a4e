"""Runs a model's own `generate`: one request at a time, or those that come together as one padded batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum

import torch
from transformers import GenerationConfig, PreTrainedModel

from transfuse.cache.groups import CacheGroup
from transfuse.engine.own_generate import OwnGenerate
from transfuse.engine.request import Request
from transfuse.engine.runner import ModelRunner, PromptLogits, StepLogits
from transfuse.engine.scheduler import Batch, ScheduledRequest

# The model's own caches are of no known size, so few requests run at once.
_MOST_AT_ONCE = 8


class Together(Enum):
    """Which requests one `generate` runs; the value says it in the start-up table."""

    NONE = "one request at a time"
    EQUAL_LENGTHS = "requests that come together with texts of equal length as one batch"
    PADDED = "requests that come together as one batch, padded to equal length"


class OriginalRunner(ModelRunner):
    """See `ModelRunner`. Whatever `generate` runs, this runs, with the cache and the mask that `generate` gives it.

    Requests whose prompts are computed in the same step may run as one batch, each batch in a thread of its own. A
    logits processor hands each step's logits to the engine, waits for the tokens that the engine's sampler chose, and
    makes `generate` choose them too. A request that has ended stays in its batch, unheeded, until the last has.

    Args:
        model: in eval mode.
        together: which requests may run as one batch.
    """

    implementation = "original"
    supports_chunks = False
    # The model's own cache grows with its requests and is gone with them; blocks only count tokens here.
    groups = (CacheGroup(0, "full", None, (0,)),)

    def __init__(self, model: PreTrainedModel, together: Together = Together.NONE) -> None:
        self._model = model
        self._together = together
        self.max_num_seqs = 1 if together is Together.NONE else _MOST_AT_ONCE
        self._generation_config = model.generation_config
        model.generation_config = _neutral(model.generation_config)
        self._idle = [OwnGenerate(model)]
        self._batches: dict[str, _OwnBatch] = {}

    @property
    def num_running(self) -> int:
        """Requests in a `generate` that has not ended."""
        return len(self._batches)

    def bytes_per_block(self, block_size: int) -> int:
        """Zero: the model's own cache is not made of blocks, and few exist at a time."""
        return 0

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """Nothing: `generate` makes its own cache."""
        return 0

    def run(self, batch: Batch) -> StepLogits:
        """See `ModelRunner.run`."""
        for request in batch.preempted:
            self.release(request.request_id)
        found: dict[str, torch.Tensor] = {}
        goes_on: dict[_OwnBatch, list[ScheduledRequest]] = defaultdict(list)
        begins: dict[int, list[ScheduledRequest]] = defaultdict(list)
        for entry in batch.entries:
            own = self._batches.get(entry.request.request_id)
            if own is not None and entry.start > 0:
                goes_on[own].append(entry)
            else:
                self.release(entry.request.request_id)
                # Those that are padded are of one kind.
                length = entry.start + entry.num_tokens
                begins[0 if self._together is Together.PADDED else length].append(entry)
        for own, entries in goes_on.items():
            found |= self._go_on(own, entries)
        for entries in begins.values():
            found |= self._begin(entries)
        # A request that is computed again goes through tokens that were chosen before.
        sampling = [entry.request for entry in batch.entries if entry.samples]
        logits = torch.stack([found[entry.request.request_id] for entry in batch.entries])
        samples = torch.tensor([entry.samples for entry in batch.entries])
        return StepLogits(logits[samples], sampling, self._prompts(batch))

    def _begin(self, entries: Sequence[ScheduledRequest]) -> dict[str, torch.Tensor]:
        """Logits [V] by request, of requests that become a batch."""
        generate = self._idle.pop() if self._idle else OwnGenerate(self._model)
        own = _OwnBatch(generate, [entry.request for entry in entries])
        self._batches |= dict.fromkeys(own.live, own)
        return self._answers(own, [entry.request.tokens(0, entry.start + entry.num_tokens) for entry in entries])

    def _go_on(self, own: _OwnBatch, entries: Sequence[ScheduledRequest]) -> dict[str, torch.Tensor]:
        """The same of requests that go on by one token; others of their batch, which do not, leave it."""
        tokens = {entry.request.request_id: entry.request.tokens(entry.start, entry.start + 1)[0] for entry in entries}
        for request_id in own.live - tokens.keys():
            self.release(request_id)
        return self._answers(own, tokens)

    def _answers(self, own: _OwnBatch, given: list[list[int]] | dict[str, int]) -> dict[str, torch.Tensor]:
        try:
            if isinstance(given, dict):
                logits = own.generate.advance([given.get(name, 0) for name in own.names])
            else:
                logits = own.generate.start(given)
        except BaseException:
            for request_id in set(own.live):
                self.release(request_id)
            raise
        return {name: row for name, row in zip(own.names, logits, strict=True) if name in own.live}

    def _prompts(self, batch: Batch) -> dict[str, PromptLogits]:
        asking = [
            entry.request
            for entry in batch.entries
            if entry.request.params.prompt_logprobs is not None and entry.start == 0
        ]
        return {
            request.request_id: PromptLogits(1, self._prompt_logits(request))
            for request in asking
            if request.num_prompt_tokens > 1
        }

    @torch.inference_mode()
    def _prompt_logits(self, request: Request) -> torch.Tensor:
        output = self._model(input_ids=torch.tensor([request.prompt_token_ids]), use_cache=False)
        logits: torch.Tensor = output.logits[0, :-1]
        return logits

    def release(self, request_id: str) -> None:
        """Leave the request out of its batch, and end the `generate` of one that is empty."""
        own = self._batches.pop(request_id, None)
        if own is not None:
            own.live.discard(request_id)
            if not own.live:
                own.generate.stop()
                self._idle.append(own.generate)

    def close(self) -> None:
        """See `ModelRunner.close`."""
        for request_id in list(self._batches):
            self.release(request_id)
        for generate in self._idle:
            generate.close()
        self._model.generation_config = self._generation_config


class _OwnBatch:
    """Requests that one `generate` runs.

    Attributes:
        generate: runs them.
        names: their ids, in the order of its rows.
        live: those that still are in it.
    """

    def __init__(self, generate: OwnGenerate, requests: Sequence[Request]) -> None:
        self.generate = generate
        self.names = [request.request_id for request in requests]
        self.live = set(self.names)


def _neutral(config: GenerationConfig) -> GenerationConfig:
    """`config` without all that chooses or ends: greedy, no penalties, no stop tokens. The engine does these."""
    kept = {name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id")}
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, eos_token_id=None, **kept)
