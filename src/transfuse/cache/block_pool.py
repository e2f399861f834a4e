"""Hands out cache blocks, counts who uses them, and remembers what full ones hold until they are needed elsewhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from transfuse.cache.prefix_hash import BlockKey

NULL_BLOCK = 0


class BlockPool:
    """Blocks `1 .. num_blocks - 1`; block 0 is the null block, which stands for positions that nobody reads.

    A block is *free* (holds nothing that can be found again), *cached* (used by nobody, found by its key) or
    *referenced* (used by one request or more, with or without a key).

    Args:
        num_blocks: blocks in the cache tensors, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs a block beside the null block"
        self._num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._num_referenced = 0
        # Freed blocks are reused before untouched ones: memory that was never written stays out of the resident set.
        self._freed: list[int] = []
        self._next_unused = NULL_BLOCK + 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is evicted first
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    @property
    def num_total(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._freed) + self._num_blocks - self._next_unused

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that a lookup still finds."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks in use."""
        return self._num_referenced

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and, by eviction, cached ones."""
        return self.num_free + self.num_cached

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks for one user: freed ones first, then untouched ones, then the least recently used cached ones.

        What they hold is arbitrary.
        """
        assert 0 <= num_blocks <= self.num_available, f"{num_blocks} blocks asked for, {self.num_available} available"
        blocks = [self._take() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        self._num_referenced += num_blocks
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a user to blocks that a lookup found."""
        for block in blocks:
            if self._num_references[block] == 0:
                assert block in self._cached, f"block {block} holds nothing to share"
                del self._cached[block]
                self._num_referenced += 1
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes a user away; of those that become unused and cached, the first given is evicted first."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is released more often than it was taken"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._num_referenced -= 1
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._freed.append(block)

    def lookup(self, key: BlockKey) -> int | None:
        """The block registered under `key`, used or not."""
        return self._block_of.get(key)

    def register(self, block: int, key: BlockKey) -> None:
        """Lets others find a block in use by what it holds."""
        assert self._num_references[block] > 0, f"block {block} is registered while nobody uses it"
        assert block not in self._key_of, f"block {block} is registered twice"
        assert key not in self._block_of, f"block {block} repeats the key of block {self._block_of.get(key)}"
        self._block_of[key] = block
        self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Undoes `register`, if it was done: nobody finds the block again; its present users keep it."""
        key = self._key_of.pop(block, None)
        if key is None:
            return
        del self._block_of[key]
        if block in self._cached:
            del self._cached[block]
            self._freed.append(block)

    def forget_all(self) -> None:
        """`forget` for every block."""
        for block in list(self._key_of):
            self.forget(block)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody uses."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def reference_counts(self) -> dict[int, int]:
        """Users per block in use."""
        return {block: count for block, count in enumerate(self._num_references) if count}

    def check(self) -> None:
        """Asserts that every block is free, cached or referenced, and exactly one of these."""
        assert self.num_free + self.num_cached + self.num_referenced == self.num_total, repr(self)
        free = {*self._freed, *range(self._next_unused, self._num_blocks)}
        referenced = set(self.reference_counts())
        assert len(free) == self.num_free, "a block is free twice"
        assert len(referenced) == self.num_referenced, "the count of referenced blocks is off"
        assert free | referenced | set(self._cached) == set(range(1, self._num_blocks)), "a block leaked"
        assert not free & set(self._key_of), "a free block can still be found"
        assert all(block in self._key_of for block in self._cached), "a cached block has no key"
        assert self._block_of == {key: block for block, key in self._key_of.items()}, "keys and blocks disagree"

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        if self._next_unused < self._num_blocks:
            self._next_unused += 1
            return self._next_unused - 1
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def __repr__(self) -> str:
        return (
            f"BlockPool(total={self.num_total}, free={self.num_free}, cached={self.num_cached}, "
            f"referenced={self.num_referenced})"
        )
