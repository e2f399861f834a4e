"""Drives a runner through the scheduler with given tokens, and keeps the logits that each request saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from transfuse.config import SchedulerConfig
from transfuse.engine.request import Request
from transfuse.engine.runner import ModelRunner
from transfuse.engine.scheduler import Scheduler
from transfuse.sampling_params import SamplingParams

BLOCK_SIZE = 4


def request(request_id: str, prompt: Sequence[int], max_tokens: int = 1, **params: object) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params),
        max_tokens=max_tokens,
        arrival_time=0.0,
    )


def random_prompts(*lengths: int, vocab_size: int = 400, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=g).tolist() for n in lengths]


class Driven:
    """A runner with a scheduler. Requests are fed `forced` tokens, not what their logits say.

    Without `allocates`, the runner has been given as many blocks of `BLOCK_SIZE` before, or more.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        prefix_caching: bool = False,
        allocates: bool = True,
    ) -> None:
        self.runner = runner
        self.budget = budget
        if allocates:
            runner.allocate_states(max_num_seqs)
            runner.allocate(num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            max_model_len=256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(256, budget),
            enable_chunked_prefill=runner.supports_chunks,
            enable_prefix_caching=prefix_caching,
            block_size=BLOCK_SIZE,
            keeps_states=runner.bytes_per_state > 0,
            replays_outputs=not runner.supports_chunks,
        )
        self.scheduler = Scheduler(config, runner.groups, num_blocks)
        self.forced: dict[str, Sequence[int]] = {}
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.requests: list[Request] = []

    def add(self, request_id: str, prompt: Sequence[int], forced: Sequence[int]) -> None:
        self.forced[request_id] = forced
        self.rows[request_id] = []
        self.requests.append(request(request_id, prompt, len(forced)))
        self.scheduler.add(self.requests[-1])

    def step(self) -> None:
        batch = self.scheduler.schedule(self.budget)
        result = self.runner.run(batch)
        sampled = {}
        for r, row in zip(result.sampling, result.logits, strict=True):
            self.rows[r.request_id].append(row.clone())
            sampled[r.request_id] = self.forced[r.request_id][len(r.output_token_ids)]
        self.scheduler.update(batch, sampled)

    def finish(self, after_each: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
        while self.scheduler.has_unfinished:
            self.step()
            after_each()
        return {request_id: torch.stack(rows) for request_id, rows in self.rows.items()}


def logits_of(
    runner: ModelRunner, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]], **settings: int
) -> dict[str, torch.Tensor]:
    """Logits [tokens, V] of each prompt, all added at once."""
    driven = Driven(runner, **settings)
    for request_id, (prompt, forced) in prompts.items():
        driven.add(request_id, prompt, forced)
    return driven.finish()
