from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfuse.cache.block_pool import BlockPool


def key(name: str) -> tuple[int, bytes]:
    return 0, name.encode()


def cached_pool(names: str, *, num_blocks: int) -> BlockPool:
    """A pool in which blocks of these names were used, registered and released, in this order."""
    pool = BlockPool(num_blocks)
    for name in names:
        (block,) = pool.allocate(1)
        pool.register(block, key(name))
        pool.release([block])
    return pool


def test_counts_add_up_and_exclude_the_null_block() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    assert 0 not in blocks and len(set(blocks)) == 3
    pool.register(blocks[0], key("a"))
    pool.release(blocks[:2])
    assert (pool.num_total, pool.num_free, pool.num_cached, pool.num_referenced) == (5, 3, 1, 1)
    assert pool.num_available == 4
    pool.check()


def test_all_blocks_can_be_taken_and_no_more() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 available"):
        pool.allocate(1)


def test_freed_blocks_go_first_then_unused_ones_then_cached_ones() -> None:
    pool = BlockPool(6)
    freed, cached, kept = pool.allocate(3)
    pool.register(cached, key("a"))
    pool.release([cached, freed])
    assert pool.allocate(1) == [freed]
    assert pool.allocate(2) == [4, 5]
    assert pool.allocate(1) == [cached]
    assert pool.lookup(key("a")) is None
    assert kept not in (freed, cached)


def test_the_least_recently_released_block_is_evicted_first() -> None:
    pool = cached_pool("abc", num_blocks=4)
    hit = pool.lookup(key("a"))
    assert hit is not None
    pool.touch([hit])
    pool.release([hit])
    pool.allocate(1)
    assert [pool.lookup(key(name)) is None for name in "abc"] == [False, True, False]


def test_a_block_in_use_is_never_evicted() -> None:
    pool = cached_pool("abc", num_blocks=4)
    hit = pool.lookup(key("a"))
    assert hit is not None
    pool.touch([hit])
    assert hit not in pool.allocate(2)
    assert pool.num_available == 0 and pool.lookup(key("a")) == hit


def test_release_order_is_eviction_order() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, "abc", strict=True):
        pool.register(block, key(name))
    pool.release(reversed(blocks))
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]


def test_a_shared_block_stays_until_its_last_user_leaves() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, key("a"))
    pool.touch([block])
    pool.release([block])
    assert pool.reference_counts() == {block: 1}
    pool.release([block])
    assert pool.num_cached == 1 and pool.num_unreferenced([block]) == 1


def test_forget_frees_a_cached_block_and_leaves_a_used_one_to_its_user() -> None:
    pool = cached_pool("ab", num_blocks=3)
    first, second = pool.lookup(key("a")), pool.lookup(key("b"))
    assert first is not None and second is not None
    pool.touch([second])
    for block in (first, second, second):
        pool.forget(block)
    assert pool.lookup(key("a")) is None and pool.lookup(key("b")) is None
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 1)
    pool.release([second])
    assert pool.num_free == 2
    pool.check()


def test_forget_all() -> None:
    pool = cached_pool("abc", num_blocks=5)
    pool.forget_all()
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check()


def test_misuse_is_caught() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, key("a"))
    with pytest.raises(AssertionError, match="registered twice"):
        pool.register(first, key("b"))
    with pytest.raises(AssertionError, match="repeats the key"):
        pool.register(second, key("a"))
    pool.release([second])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([second])
    with pytest.raises(AssertionError, match="holds nothing to share"):
        pool.touch([second])
    with pytest.raises(AssertionError, match="nobody uses it"):
        pool.register(second, key("b"))


def test_check_sees_a_leak() -> None:
    pool = BlockPool(4)
    pool.release(pool.allocate(1))
    pool._freed.clear()
    with pytest.raises(AssertionError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of sets: who holds what, and what may be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.users: list[list[int]] = []
        self.keys: dict[tuple[int, bytes], int] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            return
        blocks = self.pool.allocate(count)
        held = {block for user in self.users for block in user}
        assert 0 not in blocks and not held & set(blocks) and len(set(blocks)) == count
        self.keys = {k: block for k, block in self.keys.items() if block not in blocks}
        self.users.append(blocks)

    @rule(index=st.integers(0, 99), name=st.sampled_from("abcdef"))
    def register(self, index: int, name: str) -> None:
        held = sorted({block for user in self.users for block in user} - set(self.keys.values()))
        if held and key(name) not in self.keys:
            self.keys[key(name)] = held[index % len(held)]
            self.pool.register(held[index % len(held)], key(name))

    @rule(name=st.sampled_from("abcdef"))
    def share(self, name: str) -> None:
        block = self.pool.lookup(key(name))
        assert block == self.keys.get(key(name))
        if block is not None:
            self.pool.touch([block])
            self.users.append([block])

    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        if self.users:
            self.pool.release(self.users.pop(index % len(self.users)))

    @rule(block=st.integers(1, 8))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.keys = {k: b for k, b in self.keys.items() if b != block}

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        held = [block for user in self.users for block in user]
        assert self.pool.reference_counts() == {block: held.count(block) for block in held}
        assert self.pool.num_cached == len(set(self.keys.values()) - set(held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
