"""Plays the model for tests of the engine: logits are a function of the tokens, faults come where a test wants them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from tests.unit.engine.simulated_cache import EOS, SimulatedCache, full, make_scheduler
from transfuse.cache.groups import CacheGroup
from transfuse.engine.batch import Batch
from transfuse.engine.engine import Engine, TokenOutput
from transfuse.engine.request import Request
from transfuse.engine.runner import ModelRunner, PromptLogits, StepLogits
from transfuse.engine.sampler import Sampler
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.step_budget import StepBudget

VOCAB = EOS + 1


def hashed_logits(tokens: Sequence[int]) -> torch.Tensor:
    """Logits that every token of the context changes."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(list(tokens)).encode()))
    return torch.randn(VOCAB, generator=generator) * 3


class FakeRunner(ModelRunner):
    """See the module.

    Attributes:
        logits_of: next token's logits from all tokens before it.
        fault: called with each batch first; what it raises is raised by `run`.
        batches: all that ran, failed ones among them.
        released: ids of requests that were let go.
        closed: whether `close` was called.
    """

    implementation = "fake"
    max_num_seqs = None
    supports_chunks = True

    def __init__(self, logits_of: Callable[[Sequence[int]], torch.Tensor] = hashed_logits) -> None:
        self.groups: tuple[CacheGroup, ...] = (full(0),)
        self.logits_of = logits_of
        self.fault: Callable[[Batch], None] = lambda batch: None
        self.batches: list[Batch] = []
        self.released: set[str] = set()
        self.closed = False
        self.cache = SimulatedCache(self.groups, block_size=4)

    def bytes_per_block(self, block_size: int) -> int:
        return 1

    def allocate(self, num_blocks: int, block_size: int) -> int:
        return num_blocks

    def run(self, batch: Batch) -> StepLogits:
        self.batches.append(batch)
        try:
            self.fault(batch)
        except BaseException:
            self.cache.fail(batch)
            raise
        self.cache.run(batch)
        sampling = [entry.request for entry in batch.entries if entry.samples]
        rows = [self._row(request, request.num_tokens) for request in sampling]
        return StepLogits(torch.stack(rows) if rows else torch.empty(0, VOCAB), sampling, self._prompts(batch))

    def _prompts(self, batch: Batch) -> dict[str, PromptLogits]:
        prompts = {}
        for entry in batch.entries:
            request = entry.request
            stop = min(entry.start + entry.num_tokens, request.num_prompt_tokens - 1)
            if request.params.prompt_logprobs is not None and stop > entry.start:
                rows = [self._row(request, position + 1) for position in range(entry.start, stop)]
                prompts[request.request_id] = PromptLogits(entry.start + 1, torch.stack(rows))
        return prompts

    def _row(self, request: Request, num_tokens: int) -> torch.Tensor:
        return self.logits_of(request.tokens(0, num_tokens))

    def release(self, request_id: str) -> None:
        self.released.add(request_id)

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """An engine on a `FakeRunner`, its parts in reach."""

    def __init__(self, num_blocks: int = 200, *, runner: FakeRunner | None = None, **settings: object) -> None:
        self.runner = runner or FakeRunner()
        self.scheduler: Scheduler = make_scheduler(self.runner.groups, num_blocks, **settings)
        self.sampler = Sampler()
        self.budget = StepBudget(64, 64)
        self.engine = Engine(self.runner, self.scheduler, self.sampler, self.budget)

    def step(self) -> list[TokenOutput]:
        """One step, after which nothing may be out of order."""
        outputs = self.engine.step()
        self.scheduler.check()
        self.runner.cache.check_keys(self.scheduler.pool)
        return outputs

    def drain(self, limit: int = 500) -> list[TokenOutput]:
        """Step until nothing is left, and see that nothing is."""
        outputs: list[TokenOutput] = []
        for _ in range(limit):
            if not self.engine.has_unfinished:
                break
            outputs += self.step()
        self.check_idle()
        return outputs

    def check_idle(self) -> None:
        """Assert that no request is left, nor anything of one."""
        self.scheduler.check()
        assert not self.engine.has_unfinished
        assert self.scheduler.pool.num_referenced == 0
        assert self.sampler._states == {}
        ran = {entry.request.request_id for batch in self.runner.batches for entry in batch.entries}
        assert ran <= self.runner.released
