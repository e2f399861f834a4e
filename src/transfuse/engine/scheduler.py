"""Decides which requests run in the next step, for how many tokens, and with which cache blocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from transfuse.cache.block_pool import NULL_BLOCK, BlockPool
from transfuse.cache.groups import CacheGroup
from transfuse.cache.state_rows import StateRows
from transfuse.config import SchedulerConfig
from transfuse.engine.batch import Batch, ScheduledRequest, StepPlan
from transfuse.engine.block_tables import BlockTables
from transfuse.engine.capacity import check_capacity, longest_chunk
from transfuse.engine.queues import RequestQueues
from transfuse.engine.request import Request, RequestStatus
from transfuse.errors import PromptError, RequestError, TransfuseError
from transfuse.outputs import FinishReason

__all__ = ["Batch", "ScheduledRequest", "Scheduler"]


class Scheduler:
    """Continuous batching over a paged cache: running requests first, then waiting ones in order.

    A step is `schedule`, then the model, then `update`; or `rollback`, if the model failed. Where the pool runs out,
    the request that goes last loses its blocks and is computed again later, mostly from the prefix cache. `add`,
    `abort` and `finish` may come at any time but while the model runs the batch, which points to the requests' blocks.

    Requests of one step share blocks too: the keys and values of all its tokens are written before any is read.

    Args:
        config: limits and policy.
        groups: the model's cache groups, which all draw on one pool.
        num_blocks: blocks of the pool, the null block included.
        weights_version: version of the weights that the cache is computed with.
        clock: seconds, for the requests' timings.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        weights_version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._pool = BlockPool(num_blocks)
        self._tables = BlockTables(
            groups,
            self._pool,
            block_size=config.block_size,
            weights_version=weights_version,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        # As many rows as requests that can run, so that whoever is admitted gets one.
        self._rows = StateRows(config.max_num_seqs) if config.keeps_states else None
        self._queues = RequestQueues()
        self._num_added = 0
        self.num_prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # those that were found
        self.num_preemptions = 0
        self._in_flight: Batch | None = None
        self._published: list[int] = []  # blocks that the last step's batch computes and others may find
        self._paused_running = False

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, for the first time or again."""
        return self._queues.num_waiting

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to schedule."""
        return len(self._queues) > 0

    @property
    def state_rows(self) -> StateRows | None:
        """Rows of the state cache, for their numbers; None where the model keeps no states."""
        return self._rows

    @property
    def pool(self) -> BlockPool:
        """The pool, for its numbers."""
        return self._pool

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            CapacityError: it could never run to its end.
            PromptError: its prompt is empty.
            RequestError: its id is in use.
        """
        if self._queues.get(request.request_id) is not None:
            raise RequestError(f"Request id {request.request_id!r} is in use by an unfinished request; choose another.")
        if not request.prompt_token_ids:
            raise PromptError(f"Request {request.request_id!r} has an empty prompt; give at least one token.")
        check_capacity(request, self._config, self._tables, self._pool.num_total)
        request.rank = (request.priority if self._config.policy == "priority" else 0, self._num_added)
        self._num_added += 1
        self._tables.open(request)
        self._queues.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request with finish reason `abort`; None if no unfinished request has this id."""
        request = self._queues.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        error: TransfuseError | None = None,
    ) -> None:
        """Ends a request and frees its blocks; one that has ended stays as it is.

        With `error`, its blocks are not trusted: nobody finds them in the prefix cache any more.
        """
        if request.status is RequestStatus.FINISHED:
            return
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        if error is not None:
            self._tables.forget(request)
        self._retire(request)

    def schedule(self, token_budget: int) -> Batch:
        """The next step's batch; empty only if no request is unfinished.

        Args:
            token_budget: most tokens of the step, at least 1; `max_num_batched_tokens` bounds it too.
        """
        assert token_budget >= 1, "a step needs room for a token"
        assert self._in_flight is None, "the last step was neither updated nor rolled back"
        self._published.clear()
        step = StepPlan(min(token_budget, self._config.max_num_batched_tokens))
        isolated = self._queues.first_isolated()
        if isolated is not None:
            self._schedule_isolated(isolated, step)
        elif not self._schedule_long_prompt(step):
            self._schedule_running(step)
            if not step.preempted:
                self._schedule_waiting(step)
        batch = step.batch()
        self._in_flight = batch if batch.entries else None
        return batch

    def update(
        self, batch: Batch, sampled: Mapping[str, int], completed: Collection[str] = frozenset()
    ) -> list[Request]:
        """Takes in the step's results.

        Args:
            batch: what `schedule` returned last.
            sampled: request id to sampled token, for every entry that samples and has not been ended meanwhile.
            completed: ids of requests whose grammar has nothing after that token.

        Returns:
            The requests that their token ended.
        """
        if not batch.entries:
            return []
        assert batch is self._in_flight, "not the batch in flight"
        self._in_flight = None
        finished: list[Request] = []
        for entry in batch.entries:
            request = entry.request
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_computed_tokens = entry.start + entry.num_tokens
            self._tables.release_behind_windows(request)
            if entry.samples:
                self._append(request, sampled[request.request_id], request.request_id in completed)
                if request.finish_reason is not None:
                    self._retire(request)
                    finished.append(request)
        return finished

    def rollback(self, batch: Batch) -> None:
        """Takes a failed step back: its requests wait again, to be computed anew and each in steps of its own."""
        assert batch is self._in_flight, "not the batch in flight"
        self._in_flight = None
        for block in self._published:
            self._pool.forget(block)
        for entry in batch.entries:
            if entry.request.status is not RequestStatus.FINISHED:
                entry.request.isolate = True
                self._take_blocks(entry.request)

    def reset_prefix_cache(self) -> None:
        """Makes all that is cached so far impossible to find; running requests keep what they use."""
        self._pool.forget_all()

    def check(self) -> None:
        """Asserts that every block and every reference to it is accounted for."""
        self._queues.check()
        self._pool.check()
        held = Counter(
            block
            for request in self._queues.running
            for table in request.block_ids
            for block in table
            if block != NULL_BLOCK
        )
        assert held == self._pool.reference_counts(), "references and block tables disagree"
        if self._rows is not None:
            rows = [request.state_row for request in self._queues.running]
            self._rows.check([row for row in rows if row is not None])
            assert None not in rows, "a running request has no state row"
        for request in self._queues.running:
            for table in request.block_ids:
                assert len(table) * self._config.block_size >= request.num_computed_tokens, f"{request} lacks blocks"

    def _schedule_running(self, step: StepPlan) -> None:
        """Decodes first, so that prefill never delays a token; prefill chunks get what they leave."""
        for decodes in (True, False):
            index = 0
            while index < len(self._queues.running) and step.budget > 0:  # preemption shortens the list at its end
                request = self._queues.running[index]
                index += 1
                if request.request_id not in step.planned and (request.num_missing_tokens == 1) is decodes:
                    self._extend(request, step)
        # Only now: a request preempted above must not leave behind keys of blocks that were never computed.
        for entry, _ in step.planned.values():
            self._publish(entry)

    def _schedule_waiting(self, step: StepPlan) -> None:
        """Admits waiting requests in order; where one has to wait, so do those behind it."""
        while step.budget > 0 and len(self._queues.running) < self._config.max_num_seqs:
            request = self._queues.first_waiting()
            if request is None or not self._admit(request, step):
                return

    def _schedule_long_prompt(self, step: StepPlan) -> bool:
        """Without chunked prefill, gives a prompt that does not fit beside the running requests a step of its own.

        Never two such steps in a row, so that the running requests go on.
        """
        paused, self._paused_running = self._paused_running, False
        request = self._queues.first_waiting()
        if self._config.enable_chunked_prefill or request is None or (paused and self._queues.running):
            return False
        num_missing = request.num_tokens - self._tables.find_hit(request).num_tokens
        if (
            num_missing <= step.budget - len(self._queues.running)
            or len(self._queues.running) >= self._config.max_num_seqs
        ):
            return False
        alone = StepPlan(self._config.max_num_batched_tokens)
        if self._admit(request, alone):
            self._paused_running, step.planned = True, alone.planned
        return self._paused_running

    def _schedule_isolated(self, request: Request, step: StepPlan) -> None:
        """Runs a request that was in a failed step alone, until it is known to be harmless or ended as the culprit."""
        if not self._config.enable_chunked_prefill:
            step.budget = self._config.max_num_batched_tokens
        if request.status is RequestStatus.RUNNING:
            self._extend(request, step)
            self._publish(step.planned[request.request_id][0])
            return
        while len(self._queues.running) >= self._config.max_num_seqs or not self._admit(request, step):
            self._preempt(self._queues.running[-1], step)

    def _extend(self, request: Request, step: StepPlan) -> None:
        """Plans a running request's next tokens, if need be with the blocks of requests that go after it."""
        while (room := self._tables.room(request)) < 1:
            victim = self._queues.running[-1]
            if victim is request and request.isolate:
                victim = self._queues.running[-2]
            self._preempt(victim, step)
            if victim is request:
                return
        most = min(step.budget, room, longest_chunk(request, self._config))
        self._plan(request, min(request.num_missing_tokens, most), step)

    def _admit(self, request: Request, step: StepPlan) -> bool:
        """Starts a waiting request, unless memory or budget is short."""
        hit = self._tables.find_hit(request)
        # Beside others it needs room for all its tokens: admitted on less, it would only be preempted again.
        if self._queues.running and not self._tables.holds_whole(request, hit):
            return False
        num_missing = request.num_tokens - hit.num_tokens
        room = self._tables.room_after(request, hit)
        num_tokens = min(num_missing, step.budget, room, longest_chunk(request, self._config))
        if num_tokens < self._smallest_chunk(request, num_missing):
            return False
        self._queues.start(request)
        self._tables.adopt(request, hit)
        if self._rows is not None:
            request.state_row = self._rows.take()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            self.num_prefix_hits += request.num_cached_tokens
            self.num_prefix_queries += request.num_prompt_tokens if self._config.enable_prefix_caching else 0
        self._publish(self._plan(request, num_tokens, step))
        return True

    def _smallest_chunk(self, request: Request, num_missing: int) -> int:
        """The fewest tokens to admit a request with.

        Without chunked prefill it is all; but what a preempted request has to compute again may be more than a step
        or, when it is alone, the pool takes: then the prompt still goes in one piece, and its output follows.
        """
        if self._config.enable_chunked_prefill:
            return 1
        if self._config.replays_outputs:
            return request.num_prompt_tokens
        if self._queues.running:
            return min(num_missing, self._config.max_num_batched_tokens)
        return max(1, num_missing - len(request.output_token_ids))

    def _plan(self, request: Request, num_tokens: int, step: StepPlan) -> ScheduledRequest:
        start = request.num_computed_tokens
        entry = ScheduledRequest(request, start, num_tokens, start + num_tokens == request.num_tokens)
        step.planned[request.request_id] = (entry, self._tables.extend(request, start + num_tokens))
        step.budget -= num_tokens
        return entry

    def _publish(self, entry: ScheduledRequest) -> None:
        self._published += self._tables.publish(entry.request, entry.start + entry.num_tokens)

    def _preempt(self, request: Request, step: StepPlan) -> None:
        step.drop(request)
        step.preempted.append(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._take_blocks(request)

    def _take_blocks(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        self._queues.requeue(request)

    def _append(self, request: Request, token_id: int, completes: bool) -> None:
        self._queues.clear_isolation(request)
        request.append(token_id, completes=completes)
        if request.first_token_time is None:
            request.first_token_time = self._clock()

    def _retire(self, request: Request) -> None:
        """Lets go of a request whose finish reason is set."""
        self._release(request)
        self._queues.remove(request)
        request.finished_time = self._clock()

    def _release(self, request: Request) -> None:
        self._tables.release(request)
        if self._rows is not None and request.state_row is not None:
            self._rows.give_back(request.state_row)
            request.state_row = None
