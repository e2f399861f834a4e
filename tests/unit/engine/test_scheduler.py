from __future__ import annotations

import itertools

import pytest

from tests.unit.engine.simulated_cache import (
    EOS,
    SimulatedCache,
    drain,
    full,
    make_request,
    make_scheduler,
    run_step,
    sliding,
)
from transfuse.engine.capacity import PROMPT_LOGPROBS_CHUNK
from transfuse.engine.request import Request, RequestStatus
from transfuse.engine.scheduler import Batch, Scheduler
from transfuse.errors import NonFiniteLogitsError, PromptError, RequestError
from transfuse.sampling_params import SamplingParams

FULL = (full(0),)
MIXED = (full(0), sliding(1, 6))


def shape(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(e.request.request_id, e.start, e.num_tokens, e.samples) for e in batch.entries]


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def counting(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def forget(scheduler: Scheduler, group: int, digest: bytes) -> None:
    block = scheduler.pool.lookup((group, digest))
    assert block is not None
    scheduler.pool.forget(block)


def hit_length(scheduler: Scheduler, prompt: list[int]) -> int:
    """How much of a prompt is found; the probe leaves nothing in the cache."""
    request = make_request("probe", [*prompt, 1], 1)
    scheduler.add(request)
    batch = scheduler.schedule(64)
    scheduler.abort("probe")
    scheduler.rollback(batch)
    return request.num_cached_tokens


# Steps and budgets


def test_a_request_runs_from_prompt_to_length() -> None:
    scheduler, cache = make_scheduler(FULL, 10), SimulatedCache(FULL, 4)
    request = make_request("a", [1, 2, 3], 2)
    add(scheduler, request)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished) == (1, 0, True)
    batch, finished = run_step(scheduler, cache)
    assert shape(batch) == [("a", 0, 3, True)] and finished == []
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    batch, finished = run_step(scheduler, cache)
    assert shape(batch) == [("a", 3, 1, True)] and finished == [request]
    assert request.status is RequestStatus.FINISHED and request.finish_reason == "length"
    assert not scheduler.has_unfinished and scheduler.pool.num_referenced == 0
    assert scheduler.schedule(64) == Batch()


def test_eos_ends_a_request() -> None:
    scheduler, cache = make_scheduler(FULL, 10), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1]))
    _, (finished,) = run_step(scheduler, cache, token=EOS)
    assert finished.finish_reason == "stop"


def test_prompts_are_chunked_beside_decodes() -> None:
    scheduler, cache = make_scheduler(FULL, 30), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1, 2]))
    run_step(scheduler, cache)
    add(scheduler, make_request("b", counting(10, 20)), make_request("c", counting(40, 3)))
    steps = [shape(run_step(scheduler, cache, budget=9)[0]) for _ in range(3)]
    assert steps == [
        [("a", 2, 1, True), ("b", 0, 8, False)],
        [("a", 3, 1, True), ("b", 8, 8, False)],
        [("a", 4, 1, True), ("b", 16, 4, True), ("c", 0, 3, True)],
    ]


def test_prompts_with_logprobs_take_small_steps() -> None:
    """Each of their tokens has a row of logits."""
    scheduler = make_scheduler(FULL, 400, max_model_len=2000, max_num_batched_tokens=512)
    cache = SimulatedCache(FULL, 4)
    long = counting(10, PROMPT_LOGPROBS_CHUNK + 40)
    add(scheduler, make_request("a", long, params=SamplingParams(prompt_logprobs=0)))
    sizes = [run_step(scheduler, cache, budget=512)[0].num_tokens for _ in range(2)]
    assert sizes == [PROMPT_LOGPROBS_CHUNK, 40]


def test_single_tokens_come_first_in_the_batch() -> None:
    scheduler, cache = make_scheduler(FULL, 30), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1, 2]), make_request("b", [3]), make_request("c", [4, 5]), make_request("d", [6]))
    batch, _ = run_step(scheduler, cache)
    assert [entry.request.request_id for entry in batch.entries] == ["b", "d", "a", "c"]
    assert batch.num_tokens == 6


def test_a_prefill_that_came_first_does_not_starve_decodes() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, make_request("long", counting(0, 60)), make_request("a", [1]), make_request("b", [2]))
    assert shape(run_step(scheduler, cache, budget=64)[0])[:2] == [("a", 0, 1, True), ("b", 0, 1, True)]
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1], 20), make_request("long", counting(0, 60)))
    for step in range(10):
        batch, _ = run_step(scheduler, cache, budget=5)
        assert shape(batch)[0] == ("a", step, 1, True)
        assert batch.num_tokens == 5


def test_a_budget_below_the_number_of_decodes_still_finishes_everyone() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, *(make_request(str(i), [i], 3) for i in range(6)))
    assert len(drain(scheduler, cache, budget=2)) == 6


def test_the_step_never_exceeds_max_num_batched_tokens_or_max_num_seqs() -> None:
    scheduler, cache = make_scheduler(FULL, 40, max_num_batched_tokens=10, max_num_seqs=3), SimulatedCache(FULL, 4)
    add(scheduler, *(make_request(str(i), counting(10 * i, 4)) for i in range(6)))
    batch, _ = run_step(scheduler, cache, budget=1000)
    assert batch.num_tokens == 10
    batch, _ = run_step(scheduler, cache, budget=1000)
    assert len(batch.entries) == 3 and batch.num_tokens == 4
    assert scheduler.num_waiting == 3


def test_times_come_from_the_clock() -> None:
    ticks = itertools.count(10.0)
    scheduler = Scheduler(make_scheduler(FULL, 9)._config, FULL, 10, clock=lambda: next(ticks))
    cache, request = SimulatedCache(FULL, 4), make_request("a", [1, 2], 2)
    add(scheduler, request)
    drain(scheduler, cache)
    assert (request.first_scheduled_time, request.first_token_time, request.finished_time) == (10.0, 11.0, 12.0)


def test_a_model_without_cache_groups_is_scheduled_too() -> None:
    scheduler, cache = make_scheduler((), 1, max_num_seqs=2), SimulatedCache((), 4)
    add(scheduler, *(make_request(str(i), counting(0, 30)) for i in range(3)))
    finished = drain(scheduler, cache, budget=8)
    assert [request.num_cached_tokens for request in finished] == [0, 0, 0]


# Without chunked prefill


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    scheduler, cache = make_scheduler(FULL, 40, enable_chunked_prefill=False), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 6)), make_request("b", counting(10, 6)), make_request("c", [1]))
    assert shape(run_step(scheduler, cache, budget=10)[0]) == [("a", 0, 6, True)]
    assert shape(run_step(scheduler, cache, budget=10)[0]) == [
        ("a", 6, 1, True),
        ("c", 0, 1, True),
        ("b", 0, 6, True),
    ]


def test_a_prompt_above_the_budget_gets_a_step_of_its_own_every_other_step() -> None:
    scheduler, cache = make_scheduler(FULL, 60, enable_chunked_prefill=False), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1], 20))
    run_step(scheduler, cache, budget=8)
    add(scheduler, make_request("b", counting(10, 30)), make_request("c", counting(50, 30)))
    steps = [shape(run_step(scheduler, cache, budget=8)[0]) for _ in range(4)]
    assert steps == [
        [("b", 0, 30, True)],
        [("a", 1, 1, True), ("b", 30, 1, True)],
        [("c", 0, 30, True)],
        [("a", 2, 1, True), ("b", 31, 1, True), ("c", 30, 1, True)],
    ]


def test_recomputing_more_than_a_step_takes_keeps_the_prompt_whole() -> None:
    fields = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 8}
    scheduler, cache = make_scheduler(FULL, 9, **fields), SimulatedCache(FULL, 4)
    first, second = make_request("a", counting(0, 8), 28), make_request("b", counting(50, 8), 14)
    add(scheduler, first, second)
    resumed = None
    for _ in range(80):
        batch, _ = run_step(scheduler, cache, budget=8)
        for entry in batch.entries:
            if entry.request is second and second.num_preemptions and entry.start == 0:
                resumed = (entry.num_tokens, second.num_tokens)
    assert not scheduler.has_unfinished and second.num_preemptions > 0
    assert resumed is not None and 8 == resumed[0] < resumed[1]


def test_whole_texts_are_computed_again_as_they_were_at_first() -> None:
    fields = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "replays_outputs": True}
    scheduler, cache = make_scheduler(FULL, 9, **fields), SimulatedCache(FULL, 4)
    first, second = make_request("a", counting(0, 8), 28), make_request("b", counting(50, 8), 14)
    add(scheduler, first, second)
    again: list[tuple[int, int]] = []
    while scheduler.has_unfinished:
        batch, _ = run_step(scheduler, cache, budget=64)
        again += [(e.start, e.num_tokens) for e in batch.entries if e.request is second and second.num_preemptions]
    assert second.num_preemptions == 1
    assert again == [(0, 8), *((start, 1) for start in range(8, 21))]


# Prefix cache


def test_a_later_request_reuses_full_blocks() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 10), 1))
    drain(scheduler, cache)
    request = make_request("b", [*counting(0, 10), 77], 1)
    add(scheduler, request)
    batch, _ = run_step(scheduler, cache)
    assert shape(batch) == [("b", 8, 3, True)]
    assert request.num_cached_tokens == 8


def test_the_last_token_is_always_computed() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    for name in "ab":
        request = make_request(name, counting(0, 8), 1)
        add(scheduler, request)
        drain(scheduler, cache)
    assert request.num_cached_tokens == 4


def test_outputs_are_reused_as_well() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    first = make_request("a", [5, 6], 7)
    add(scheduler, first)
    drain(scheduler, cache)
    request = make_request("b", [*first.tokens(0, first.num_tokens), 8], 1)
    add(scheduler, request)
    drain(scheduler, cache)
    assert request.num_cached_tokens == 8


@pytest.mark.parametrize("fields", [{"salt": b"x"}, {"params": SamplingParams(prompt_logprobs=0)}])
def test_nothing_is_read_with_another_salt_or_for_prompt_logprobs(fields: dict[str, object]) -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 9), 1))
    drain(scheduler, cache)
    request = make_request("b", counting(0, 9), 1, **fields)
    add(scheduler, request)
    assert shape(run_step(scheduler, cache)[0]) == [("b", 0, 9, True)]
    assert request.num_cached_tokens == 0


def test_prompt_logprobs_still_fill_the_cache() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 9), 1, params=SamplingParams(prompt_logprobs=0)))
    drain(scheduler, cache)
    request = make_request("b", counting(0, 9), 1)
    add(scheduler, request)
    drain(scheduler, cache)
    assert request.num_cached_tokens == 8


def test_it_can_be_turned_off() -> None:
    scheduler, cache = make_scheduler(FULL, 20, enable_prefix_caching=False), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 9), 1), make_request("b", counting(0, 9), 1))
    batch, _ = run_step(scheduler, cache)
    assert batch.num_tokens == 18
    assert scheduler.pool.num_cached == 0


def test_requests_of_one_step_share_what_it_computes() -> None:
    scheduler, cache = make_scheduler(MIXED, 40), SimulatedCache(MIXED, 4)
    requests = [make_request(str(i), counting(0, 18), 6) for i in range(3)]
    add(scheduler, *requests)
    batch, _ = run_step(scheduler, cache)
    assert shape(batch) == [("0", 0, 18, True), ("1", 16, 2, True), ("2", 16, 2, True)]
    assert requests[0].block_ids[0][:4] == requests[1].block_ids[0][:4] == requests[2].block_ids[0][:4]
    assert len({request.block_ids[0][4] for request in requests}) == 3
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]
    assert len(drain(scheduler, cache)) == 3


def test_a_waiting_request_shares_what_a_running_one_computes_in_this_step() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 30)))
    run_step(scheduler, cache, budget=16)
    add(scheduler, make_request("b", counting(0, 30)))
    assert shape(run_step(scheduler, cache, budget=30)[0]) == [("a", 16, 14, True), ("b", 28, 2, True)]


def test_equal_blocks_computed_side_by_side_stay_private() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    first, second = make_request("a", [1, 2, 3], 9), make_request("b", [1, 2, 3], 9)
    add(scheduler, first, second)
    run_step(scheduler, cache)
    run_step(scheduler, cache)
    assert first.tokens(0, 4) == second.tokens(0, 4)
    assert first.block_ids[0][0] != second.block_ids[0][0]
    assert len(drain(scheduler, cache)) == 2
    # Eleven tokens were computed, two full blocks of them; the twins of those were freed.
    assert scheduler.pool.num_cached == 2


def test_reset_forgets_cached_blocks_and_leaves_running_requests_alone() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 9), 9))
    run_step(scheduler, cache)
    scheduler.reset_prefix_cache()
    scheduler.check()
    request = make_request("b", counting(0, 9), 1)
    add(scheduler, request)
    assert len(drain(scheduler, cache)) == 2
    assert request.num_cached_tokens == 0


def test_another_version_of_the_weights_gives_other_keys() -> None:
    digests = []
    for version in (0, 0, 1):
        scheduler = Scheduler(make_scheduler(FULL, 9)._config, FULL, 10, weights_version=version)
        request = make_request("a", counting(0, 9), 1)
        add(scheduler, request)
        drain(scheduler, SimulatedCache(FULL, 4))
        digests.append(request.block_digests)
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


# Sliding windows and groups


def test_blocks_behind_the_window_are_freed() -> None:
    scheduler, cache = make_scheduler(MIXED, 40), SimulatedCache(MIXED, 4)
    request = make_request("a", counting(0, 14), 20)
    add(scheduler, request)
    run_step(scheduler, cache)
    # The next token, at 14, sees positions 9 to 14: blocks 2 and 3.
    assert [block == 0 for block in request.block_ids[1]] == [True, True, False, False]
    assert all(request.block_ids[0])
    assert scheduler.pool.num_referenced == 6
    drain(scheduler, cache)


def test_a_window_of_one_keeps_nothing() -> None:
    groups = (sliding(0, 1),)
    scheduler, cache = make_scheduler(groups, 5), SimulatedCache(groups, 4)
    request = make_request("a", counting(0, 8), 9)
    add(scheduler, request)
    run_step(scheduler, cache)
    assert request.block_ids == [[0, 0]]
    drain(scheduler, cache)


def test_a_sliding_model_runs_beyond_the_size_of_its_pool() -> None:
    groups = (sliding(0, 6),)
    scheduler, cache = make_scheduler(groups, 3), SimulatedCache(groups, 4)
    request = make_request("a", counting(0, 60), 60)
    add(scheduler, request)
    assert drain(scheduler, cache, budget=64) == [request]
    assert request.num_preemptions == 0


def test_a_sliding_group_needs_only_its_window() -> None:
    groups = (sliding(0, 6),)
    scheduler, cache = make_scheduler(groups, 20), SimulatedCache(groups, 4)
    first = make_request("a", counting(0, 20), 1)
    add(scheduler, first)
    drain(scheduler, cache)
    for digest in first.block_digests[:3]:
        forget(scheduler, 0, digest)
    request = make_request("b", [*counting(0, 20), 1], 1)
    add(scheduler, request)
    run_step(scheduler, cache)
    assert request.num_cached_tokens == 20


def test_a_hit_is_the_minimum_over_the_groups() -> None:
    scheduler, cache = make_scheduler(MIXED, 40), SimulatedCache(MIXED, 4)
    first = make_request("a", counting(0, 20), 1)
    add(scheduler, first)
    drain(scheduler, cache)
    # The sliding group needs the five positions before the next token: the last two blocks of the hit.
    assert hit_length(scheduler, counting(0, 20)) == 20
    forget(scheduler, 1, first.block_digests[4])
    assert hit_length(scheduler, counting(0, 20)) == 16
    forget(scheduler, 0, first.block_digests[3])
    assert hit_length(scheduler, counting(0, 20)) == 12
    # The windows before 12 and 8 reach into block 1; the one before 4 does not.
    forget(scheduler, 1, first.block_digests[1])
    assert hit_length(scheduler, counting(0, 20)) == 4
    forget(scheduler, 0, first.block_digests[0])
    assert hit_length(scheduler, counting(0, 20)) == 0


def test_two_sliding_groups_settle_on_a_length_that_suits_both() -> None:
    groups = (sliding(0, 5), sliding(1, 9))
    scheduler, cache = make_scheduler(groups, 40), SimulatedCache(groups, 4)
    first = make_request("a", counting(0, 24), 1)
    add(scheduler, first)
    drain(scheduler, cache)
    forget(scheduler, 0, first.block_digests[4])
    forget(scheduler, 1, first.block_digests[3])
    assert hit_length(scheduler, counting(0, 24)) == 24
    # Now group 0 goes down to 16, where group 1 lacks block 3 and goes down to 12, which suits group 0 too.
    forget(scheduler, 0, first.block_digests[5])
    assert hit_length(scheduler, counting(0, 24)) == 12
    # 12 no longer suits group 0: it goes down to 8, and the first two blocks suit group 1.
    forget(scheduler, 0, first.block_digests[2])
    assert hit_length(scheduler, counting(0, 24)) == 8


# Memory pressure


@pytest.mark.parametrize("groups", [FULL, MIXED])
def test_a_tiny_pool_preempts_and_all_finish(groups: tuple) -> None:
    scheduler, cache = make_scheduler(groups, 14), SimulatedCache(groups, 4)
    requests = [make_request(str(i), counting(10 * i, 8), 16) for i in range(5)]
    add(scheduler, *requests)
    finished = drain(scheduler, cache)
    assert sorted(request.request_id for request in finished) == list("01234")
    assert sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0
    assert all(len(request.output_token_ids) == 16 for request in requests)


def test_the_last_arrived_gives_way_and_resumes_from_the_cache() -> None:
    scheduler, cache = make_scheduler(FULL, 5), SimulatedCache(FULL, 4)
    first, second, third = (make_request(name, counting(n, 8), 9) for name, n in (("a", 0), ("b", 20), ("c", 40)))
    add(scheduler, first, second, third)
    batch, _ = run_step(scheduler, cache)
    assert [entry.request.request_id for entry in batch.entries] == ["a", "b"]
    # Four blocks are full. One is left, for the first request; the second has to give way.
    batch, _ = run_step(scheduler, cache)
    assert batch.preempted == (second,) and second.num_preemptions == 1
    assert shape(batch) == [("a", 8, 1, True)]
    assert (second.status, second.num_computed_tokens, second.block_ids) == (RequestStatus.WAITING, 0, [[]])
    for _ in range(7):
        run_step(scheduler, cache)
    assert first.finish_reason == "length"
    batch, _ = run_step(scheduler, cache)
    # It goes before the third. Of its two full blocks the first survived: the tail is evicted before the head.
    assert batch.entries[0].request is second
    assert batch.entries[0].start == 4
    assert second.num_cached_tokens == 0
    assert len(drain(scheduler, cache)) == 2


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler, cache = make_scheduler(FULL, 6, policy="priority"), SimulatedCache(FULL, 4)
    victim = make_request("b", counting(20, 16), 4, priority=9)
    add(scheduler, make_request("a", counting(0, 8), 9), victim)
    run_step(scheduler, cache)
    add(scheduler, make_request("c", [1], 1, priority=1))
    batch, _ = run_step(scheduler, cache)
    assert batch.preempted == (victim,)
    assert [entry.request.request_id for entry in batch.entries] == ["a"]
    batch, _ = run_step(scheduler, cache)
    assert [entry.request.request_id for entry in batch.entries] == ["a", "c"]


def test_a_victim_that_was_planned_already_leaves_the_step() -> None:
    groups = (full(0), full(1))
    scheduler, cache = make_scheduler(groups, 17, policy="priority"), SimulatedCache(groups, 4)
    low, high = make_request("low", counting(0, 9), 20, priority=9), make_request("high", counting(50, 20), 2)
    add(scheduler, low)
    run_step(scheduler, cache)
    add(scheduler, high)
    for _ in range(6):
        assert run_step(scheduler, cache, budget=4)[0].preempted == ()
    assert (low.num_computed_tokens, high.num_computed_tokens) == (15, 16)
    # The decode, which would fill a block, is planned before the prefill, which then finds no room and takes its place.
    batch, _ = run_step(scheduler, cache, budget=4)
    assert batch.preempted == (low,)
    assert shape(batch) == [("high", 16, 4, True)]
    assert set(batch.fresh_blocks) == {table[-1] for table in high.block_ids}
    assert len(drain(scheduler, cache, budget=4)) == 2


def test_admission_waits_for_room_for_the_whole_request() -> None:
    scheduler, cache = make_scheduler(FULL, 10), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 8), 20), make_request("b", counting(20, 36), 2))
    batch, _ = run_step(scheduler, cache, budget=16)
    assert [entry.request.request_id for entry in batch.entries] == ["a"]
    assert len(drain(scheduler, cache, budget=16)) == 2
    assert scheduler.pool.num_referenced == 0


def test_fresh_blocks_are_those_just_handed_out() -> None:
    scheduler, cache = make_scheduler(MIXED, 20), SimulatedCache(MIXED, 4)
    request = make_request("a", counting(0, 7), 4)
    add(scheduler, request)
    batch, _ = run_step(scheduler, cache)
    assert sorted(batch.fresh_blocks) == sorted(request.block_ids[0] + request.block_ids[1])
    assert run_step(scheduler, cache)[0].fresh_blocks == ()
    batch, _ = run_step(scheduler, cache)
    assert set(batch.fresh_blocks) == {request.block_ids[0][2], request.block_ids[1][2]}


# Priorities


def test_lower_numbers_are_admitted_first_and_arrival_breaks_ties() -> None:
    scheduler, cache = make_scheduler(FULL, 40, policy="priority", max_num_seqs=1), SimulatedCache(FULL, 4)
    add(scheduler, *(make_request(name, [1], 1, priority=p) for name, p in (("a", 5), ("b", 0), ("c", 5), ("d", -1))))
    assert [request.request_id for request in drain(scheduler, cache)] == ["d", "b", "a", "c"]


def test_under_fcfs_priorities_mean_nothing() -> None:
    scheduler, cache = make_scheduler(FULL, 40, max_num_seqs=1), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1], 1, priority=5), make_request("b", [1], 1, priority=0))
    assert [request.request_id for request in drain(scheduler, cache)] == ["a", "b"]


def test_the_least_important_gives_way_and_the_important_one_only_waits_for_room() -> None:
    scheduler, cache = make_scheduler(FULL, 6, policy="priority"), SimulatedCache(FULL, 4)
    low, high = (
        make_request("low", counting(0, 8), 12, priority=9),
        make_request("high", counting(20, 8), 12, priority=1),
    )
    add(scheduler, low, make_request("mid", counting(40, 8), 4, priority=5))
    run_step(scheduler, cache)
    add(scheduler, high)
    batch, _ = run_step(scheduler, cache)
    assert batch.preempted == () and high.status is RequestStatus.WAITING
    finished = [request.request_id for request in drain(scheduler, cache)]
    assert finished == ["mid", "high", "low"]
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


# Ends


def test_abort_frees_a_waiting_and_a_running_request() -> None:
    scheduler, cache = make_scheduler(FULL, 20, max_num_seqs=1), SimulatedCache(FULL, 4)
    running, waiting = make_request("a", counting(0, 9)), make_request("b", [1])
    add(scheduler, running, waiting)
    run_step(scheduler, cache)
    assert scheduler.abort("b") is waiting and scheduler.abort("a") is running
    assert scheduler.abort("a") is None and scheduler.abort("never seen") is None
    for request in (running, waiting):
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
        assert request.finished_time is not None
    assert not scheduler.has_unfinished and scheduler.pool.num_referenced == 0
    scheduler.check()


def test_aborts_in_a_long_queue_leave_the_order_as_it_was() -> None:
    scheduler, cache = make_scheduler(FULL, 40, max_num_seqs=1), SimulatedCache(FULL, 4)
    add(scheduler, *(make_request(str(i), [i], 1) for i in range(100)))
    for i in range(100):
        if i % 10:
            scheduler.abort(str(i))
    assert [request.request_id for request in drain(scheduler, cache)] == [str(i) for i in range(0, 100, 10)]


def test_an_id_can_be_used_again_once_its_request_ended() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use"):
        add(scheduler, make_request("a", [2]))
    scheduler.abort("a")
    add(scheduler, make_request("a", [2]))
    assert [request.prompt_token_ids for request in drain(scheduler, cache)] == [[2]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="'a' has an empty prompt"):
        add(make_scheduler(FULL, 20), make_request("a", []))


def test_finish_by_a_stop_string_keeps_the_cache() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    request = make_request("a", counting(0, 9))
    add(scheduler, request)
    run_step(scheduler, cache)
    scheduler.finish(request, "stop", "\n\n")
    assert (request.finish_reason, request.stop_reason) == ("stop", "\n\n")
    scheduler.finish(request, "abort")
    assert request.finish_reason == "stop"
    assert scheduler.pool.num_cached == 2
    scheduler.check()


def test_finish_with_an_error_forgets_what_the_request_computed_and_read() -> None:
    scheduler, cache = make_scheduler(MIXED, 40), SimulatedCache(MIXED, 4)
    request = make_request("a", counting(0, 18), 9)
    add(scheduler, request)
    run_step(scheduler, cache)
    error = NonFiniteLogitsError("NaN")
    cache.poison(range(1, 41))
    scheduler.finish(request, "error", error=error)
    assert request.error is error
    assert scheduler.pool.num_cached == 0
    add(scheduler, make_request("b", counting(0, 18), 9))
    assert len(drain(scheduler, cache)) == 1


def test_a_request_aborted_during_the_step_is_left_out_of_its_results() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    request, other = make_request("a", counting(0, 9)), make_request("b", counting(0, 9))
    add(scheduler, request, other)
    batch = scheduler.schedule(64)
    cache.run(batch)
    scheduler.abort("a")
    assert scheduler.update(batch, {"b": 3}) == []
    assert (request.output_token_ids, other.output_token_ids) == ([], [3])
    scheduler.check()
    drain(scheduler, cache)


# Failed steps


def test_rollback_sends_all_back_to_the_front_one_by_one() -> None:
    scheduler, cache = make_scheduler(FULL, 30, max_num_seqs=2), SimulatedCache(FULL, 4)
    requests = [make_request(name, counting(20 * i, 9), 3) for i, name in enumerate("abc")]
    add(scheduler, *requests)
    run_step(scheduler, cache)
    batch = scheduler.schedule(64)
    cache.fail(batch)
    scheduler.rollback(batch)
    scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    assert [request.isolate for request in requests] == [True, True, False]
    assert all(request.num_computed_tokens == 0 for request in requests)
    alone = [shape(run_step(scheduler, cache)[0]) for _ in range(2)]
    # Blocks of earlier steps are still good.
    assert alone == [[("a", 8, 2, True)], [("b", 8, 2, True)]]
    assert not any(request.isolate for request in requests)
    assert shape(run_step(scheduler, cache)[0]) == [("a", 10, 1, True), ("b", 10, 1, True)]
    assert drain(scheduler, cache) == [requests[2]]


def test_rollback_forgets_blocks_of_the_failed_step() -> None:
    scheduler, cache = make_scheduler(MIXED, 40), SimulatedCache(MIXED, 4)
    add(scheduler, make_request("a", counting(0, 18)), make_request("b", counting(0, 18)))
    batch = scheduler.schedule(64)
    cache.fail(batch)
    scheduler.abort("a")
    scheduler.rollback(batch)
    scheduler.check()
    assert scheduler.pool.num_cached == 0
    assert shape(run_step(scheduler, cache)[0]) == [("b", 0, 18, True)]
    drain(scheduler, cache)


def test_an_isolated_prompt_stays_alone_until_all_its_chunks_went_well() -> None:
    scheduler, cache = make_scheduler(FULL, 40), SimulatedCache(FULL, 4)
    add(scheduler, make_request("calm", [1], 20))
    run_step(scheduler, cache)
    suspect = make_request("suspect", counting(20, 20))
    add(scheduler, suspect)
    batch = scheduler.schedule(16)
    cache.fail(batch)
    scheduler.rollback(batch)
    steps = [shape(run_step(scheduler, cache, budget=16)[0]) for _ in range(4)]
    assert steps == [
        [("calm", 0, 2, True)],
        [("suspect", 0, 16, False)],
        [("suspect", 16, 4, True)],
        [("calm", 2, 1, True), ("suspect", 20, 1, True)],
    ]


def test_an_isolated_request_takes_the_blocks_it_needs() -> None:
    scheduler, cache = make_scheduler(FULL, 6), SimulatedCache(FULL, 4)
    others = [make_request(name, counting(20 * i, 8), 8) for i, name in enumerate("ab")]
    add(scheduler, *others)
    run_step(scheduler, cache)
    request = make_request("alone", counting(70, 20), 2, isolate=True)
    add(scheduler, request)
    batch, _ = run_step(scheduler, cache)
    assert shape(batch) == [("alone", 0, 20, True)]
    assert batch.preempted == (others[1], others[0])
    assert len(drain(scheduler, cache)) == 3


def test_steps_do_not_overlap() -> None:
    scheduler = make_scheduler(FULL, 20)
    add(scheduler, make_request("a", [1]))
    batch = scheduler.schedule(8)
    with pytest.raises(AssertionError, match="neither updated nor rolled back"):
        scheduler.schedule(8)
    scheduler.update(batch, {"a": 1})
    with pytest.raises(AssertionError, match="not the batch in flight"):
        scheduler.rollback(batch)


def test_check_sees_a_leaked_reference() -> None:
    scheduler, cache = make_scheduler(FULL, 20), SimulatedCache(FULL, 4)
    add(scheduler, make_request("a", counting(0, 9)))
    run_step(scheduler, cache)
    scheduler.pool.allocate(1)
    with pytest.raises(AssertionError, match="references and block tables disagree"):
        scheduler.check()
