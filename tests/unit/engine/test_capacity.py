from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.simulated_cache import SimulatedCache, drain, full, make_request, make_scheduler, sliding
from transfuse.cache.groups import CacheGroup
from transfuse.engine.scheduler import Scheduler
from transfuse.errors import CapacityError

FULL = (full(0),)


def test_longer_than_the_model() -> None:
    scheduler = make_scheduler(FULL, 100, max_model_len=20)
    scheduler.add(make_request("fits", [1] * 15, 5))
    with pytest.raises(
        CapacityError,
        match=r"'b' asks for 21 tokens \(16 prompt tokens and max_tokens=5\); the limit is "
        r"max_model_len=20\. Shorten the prompt, lower max_tokens or raise",
    ):
        scheduler.add(make_request("b", [1] * 16, 5))
    assert scheduler.num_waiting == 1


def test_longer_than_a_step_without_chunks() -> None:
    scheduler = make_scheduler(FULL, 100, enable_chunked_prefill=False, max_num_batched_tokens=32)
    scheduler.add(make_request("fits", [1] * 32, 5))
    with pytest.raises(
        CapacityError,
        match=r"'b' has 33 prompt tokens; without chunked prefill the limit is "
        r"max_num_batched_tokens=32\.",
    ):
        scheduler.add(make_request("b", [1] * 33, 5))


def test_larger_than_the_pool() -> None:
    scheduler = make_scheduler(FULL, 5)
    # The keys and values of the last token are never computed: 20 slots hold 21 tokens.
    scheduler.add(make_request("fits", [1] * 15, 6))
    with pytest.raises(
        CapacityError,
        match=r"'b' needs 6 cache blocks of 4 tokens \(15 prompt tokens and max_tokens=7\); "
        r"the cache has 5\. .*give the cache more memory",
    ):
        scheduler.add(make_request("b", [1] * 15, 7))


def test_windows_count_with_what_they_keep() -> None:
    groups = (full(0), sliding(1, 6))
    # 40 tokens: ten blocks in the full group; six positions lie in at most three blocks.
    make_scheduler(groups, 13).add(make_request("a", [1] * 30, 11))
    with pytest.raises(CapacityError, match="needs 13 cache blocks"):
        make_scheduler(groups, 12).add(make_request("a", [1] * 30, 11))


def test_a_whole_prompt_counts_in_all_groups() -> None:
    groups = (sliding(0, 6), sliding(1, 6))
    make_scheduler(groups, 6).add(make_request("a", [1] * 40, 11))
    with pytest.raises(CapacityError, match="needs 20 cache blocks"):
        make_scheduler(groups, 19, enable_chunked_prefill=False).add(make_request("a", [1] * 40, 11))


GROUPS = st.lists(st.sampled_from([None, 1, 2, 5, 8, 13]), min_size=1, max_size=3).map(
    lambda windows: tuple(full(i) if window is None else sliding(i, window) for i, window in enumerate(windows))
)


def needed_blocks(groups: tuple[CacheGroup, ...], num_prompt: int, max_tokens: int, **fields: object) -> int:
    """The fewest blocks of a pool that admits the request."""
    for num_blocks in range(1, 200):
        try:
            make_scheduler(groups, num_blocks, **fields).add(make_request("a", [1] * num_prompt, max_tokens))
        except CapacityError:
            continue
        return num_blocks
    raise AssertionError("no pool is large enough")


def most_referenced(scheduler: Scheduler, budget: int) -> int:
    most = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule(budget)
        most = max(most, scheduler.pool.num_referenced)
        scheduler.update(batch, {e.request.request_id: 1 for e in batch.entries if e.samples})
    return most


@given(groups=GROUPS, num_prompt=st.integers(1, 30), max_tokens=st.integers(1, 30), chunked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_limit_is_exact(groups: tuple[CacheGroup, ...], num_prompt: int, max_tokens: int, chunked: bool) -> None:
    fields = {"enable_chunked_prefill": chunked, "enable_prefix_caching": False}
    needed = needed_blocks(groups, num_prompt, max_tokens, **fields)
    roomy, tight = make_scheduler(groups, 200, **fields), make_scheduler(groups, needed, **fields)
    for scheduler in (roomy, tight):
        scheduler.add(make_request("a", list(range(num_prompt)), max_tokens))
    # No run needs fewer blocks than one that computes as little as possible at a time.
    assert most_referenced(roomy, 1 if chunked else 64) == needed
    (finished,) = drain(tight, SimulatedCache(groups, 4))
    assert finished.num_preemptions == 0
