"""Random traffic through scheduler and pool, with a simulated cache that shows what each token would really read."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.simulated_cache import (
    EOS,
    SimulatedCache,
    full,
    make_config,
    make_request,
    prefix_hashes,
    sliding,
)
from transfuse.engine.request import Request, RequestStatus
from transfuse.engine.scheduler import Batch, Scheduler
from transfuse.errors import CapacityError, NonFiniteLogitsError
from transfuse.sampling_params import SamplingParams

GROUPS = (
    (full(0),),
    (sliding(0, 5),),
    (full(0), sliding(1, 3)),
    (sliding(0, 1), full(1), sliding(2, 9)),
    (sliding(0, 4), sliding(1, 7)),
    (),
)
# Prompts start alike, so that there is much to share.
FAMILIES = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 20, 21, 22, 23, 24, 25], [9] * 12)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(8, 30),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(6, 40),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.sampled_from([True, True, False]),
        kept=st.sampled_from(["prefixes", "prefixes", "prefixes", "nothing", "states", "whole texts"]),
        seed=st.integers(0, 2**32),
    )
    def start(self, groups, block_size, num_blocks, chunked, kept, seed, **limits) -> None:  # noqa: ANN001, ANN003
        self.config = make_config(
            block_size=block_size,
            enable_chunked_prefill=chunked and kept != "whole texts",
            enable_prefix_caching=kept == "prefixes",
            keeps_states=kept == "states",
            replays_outputs=kept == "whole texts",
            **limits,
        )
        self.scheduler = Scheduler(self.config, groups, num_blocks + 1)
        self.cache = SimulatedCache(groups, block_size, keeps_states=kept == "states")
        self.random = random.Random(seed)
        self.live: dict[str, Request] = {}
        self.num_added = 0
        self.last_was_alone = False

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 12),
        tail=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.integers(1, 16),
        copies=st.sampled_from([1, 1, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"", b"x"]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def add(
        self,
        family: list[int],
        shared: int,
        tail: list[int],
        max_tokens: int,
        copies: int,
        priority: int,
        salt: bytes,
        prompt_logprobs: int | None,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        prompt = [*family[:shared], *tail] or [1]
        for _ in range(copies):
            self.num_added += 1
            name = str(self.num_added)
            request = make_request(name, prompt, max_tokens, params=params, priority=priority, salt=salt)
            try:
                self.scheduler.add(request)
            except CapacityError:
                return
            self.live[name] = request

    @precondition(lambda self: self.live)
    @rule(budgets=st.lists(st.integers(1, 50), min_size=1, max_size=8))
    def steps(self, budgets: list[int]) -> None:
        for budget in budgets:
            if self.live:
                batch = self.schedule(budget)
                self.cache.run(batch)
                self.update(batch)
                self.scheduler.check()
                self.cache.check_keys(self.scheduler.pool)

    @precondition(lambda self: self.live)
    @rule(
        event=st.sampled_from(["abort", "abort in step", "stop string", "bad numbers", "failed step", "reset"]),
        budget=st.integers(1, 50),
        and_abort=st.booleans(),
    )
    def disturb(self, event: str, budget: int, and_abort: bool) -> None:
        request = self.random.choice(list(self.live.values()))
        if event == "abort":
            self.abort(request)
        elif event == "abort in step":
            batch = self.schedule(budget)
            self.cache.run(batch)
            self.abort(self.random.choice(batch.entries).request)
            self.update(batch)
        elif event == "stop string":
            self.scheduler.finish(request, "stop", "\n")
            self.end(request)
        elif event == "bad numbers":
            self.bad_numbers(request)
        elif event == "failed step":
            self.failed_step(budget, and_abort=and_abort)
        else:
            self.scheduler.reset_prefix_cache()
            assert self.scheduler.pool.num_cached == 0

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort(request.request_id) is request and request.finish_reason == "abort"
        self.end(request)

    def bad_numbers(self, request: Request) -> None:
        counts = self.scheduler.pool.reference_counts()
        self.cache.poison([block for table in request.block_ids for block in table if counts.get(block) == 1])
        self.scheduler.finish(request, "error", error=NonFiniteLogitsError("NaN"))
        self.end(request)

    def failed_step(self, budget: int, *, and_abort: bool) -> None:
        batch = self.schedule(budget)
        self.cache.fail(batch)
        if and_abort:
            self.abort(self.random.choice(batch.entries).request)
        self.scheduler.rollback(batch)
        for entry in batch.entries:
            request = entry.request
            if request.request_id in self.live:
                assert (request.status, request.isolate) == (RequestStatus.WAITING, True)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool = self.scheduler.pool
        self.scheduler.check()
        self.cache.check_keys(pool)
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_total
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.live or pool.num_referenced == 0

    @invariant()
    def every_state_row_is_held_by_one_that_runs(self) -> None:
        rows = self.scheduler.state_rows
        if rows is not None:
            running = [r for r in self.live.values() if r.status is RequestStatus.RUNNING]
            rows.check([r.state_row for r in running])
            assert rows.num_held == len(running) == self.scheduler.num_running
            assert all(r.state_row is None for r in self.live.values() if r.status is not RequestStatus.RUNNING)

    @invariant()
    def blocks_are_shared_only_where_they_hold_the_same(self) -> None:
        holders: dict[int, object] = {}
        for request in self.live.values():
            prefixes = prefix_hashes(request)
            for group, table in enumerate(request.block_ids):
                for index, block in enumerate(table):
                    stop = (index + 1) * self.config.block_size
                    is_full = stop <= request.num_computed_tokens
                    # What is not full belongs to one request.
                    holds = (group, prefixes[stop - 1]) if is_full else (group, request.request_id)
                    assert block == 0 or holders.setdefault(block, holds) == holds

    def teardown(self) -> None:
        """All that is queued finishes."""
        if not hasattr(self, "live"):
            return
        for _ in range(3000):
            if not self.live:
                break
            batch = self.schedule(self.config.max_num_batched_tokens)
            self.cache.run(batch)
            self.update(batch)
            self.scheduler.check()
        assert not self.live, f"requests starve: {list(self.live.values())}"
        assert not self.scheduler.has_unfinished and self.scheduler.pool.num_referenced == 0

    def schedule(self, budget: int) -> Batch:
        running = {name for name, request in self.live.items() if request.status is RequestStatus.RUNNING}
        isolated = {name for name, request in self.live.items() if request.isolate}
        batch = self.scheduler.schedule(budget)
        names = [entry.request.request_id for entry in batch.entries]
        assert names and len(set(names)) == len(names) <= self.config.max_num_seqs
        self.check_entries(batch)
        assert not isolated or (len(names) == 1 and names[0] in isolated)
        alone = not self.config.enable_chunked_prefill and len(names) == 1 and batch.num_tokens > budget
        assert batch.num_tokens <= (self.config.max_num_batched_tokens if alone else budget)
        if batch.preempted and not isolated:
            assert set(names) <= running, "somebody was admitted in a step that preempted"
        if not isolated and not alone and self.config.enable_chunked_prefill:
            self.check_decodes(set(names), running, budget)
        assert not (alone and self.last_was_alone and running and not isolated), "running requests are kept waiting"
        self.last_was_alone = alone and not isolated
        return batch

    def check_entries(self, batch: Batch) -> None:
        lengths = [entry.num_tokens for entry in batch.entries]
        assert lengths == sorted(lengths, key=lambda length: length > 1) and min(lengths) >= 1
        for entry in batch.entries:
            request = entry.request
            assert entry.start == request.num_computed_tokens
            assert entry.samples == (entry.start + entry.num_tokens == request.num_tokens)
            if not self.config.enable_chunked_prefill:
                assert entry.start + entry.num_tokens >= request.num_prompt_tokens, "a prompt was split"
            if self.config.replays_outputs:
                assert entry.num_tokens == (1 if entry.start else request.num_prompt_tokens)

    def check_decodes(self, names: set[str], running: set[str], budget: int) -> None:
        """Where the budget suffices, no decode waits but those that had to give way."""
        if min(budget, self.config.max_num_batched_tokens) >= len(running):
            for name in running - names:
                request = self.live[name]
                assert request.status is RequestStatus.WAITING or request.num_missing_tokens > 1

    def update(self, batch: Batch) -> None:
        tokens = [EOS, 0, 1, 2, 3, 4, 5, 6]
        sampled = {e.request.request_id: self.random.choice(tokens) for e in batch.entries if e.samples}
        before = {e.request.request_id: e.request.num_tokens for e in batch.entries}
        finished = self.scheduler.update(batch, sampled)
        for entry in batch.entries:
            request = entry.request
            if request.request_id in self.live:
                assert request.num_tokens == before[request.request_id] + entry.samples
        for request in finished:
            assert request.finish_reason in ("stop", "length")
            self.end(request)

    def end(self, request: Request) -> None:
        assert request.status is RequestStatus.FINISHED
        assert request.block_ids == [[] for _ in self.cache.groups]
        assert request.state_row is None
        del self.live[request.request_id]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
