"""Gives requests their blocks in every cache group: found by prefix, added as they grow, released as windows pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfuse.cache.block_pool import NULL_BLOCK, BlockPool
from transfuse.cache.groups import CacheGroup
from transfuse.cache.prefix_hash import block_digest, root_digest
from transfuse.engine.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading tokens of a request that the cache holds already.

    Attributes:
        num_tokens: how many, a multiple of the block size.
        block_ids: per cache group, their blocks; null where a sliding window has passed.
    """

    num_tokens: int
    block_ids: list[list[int]]

    def blocks(self) -> list[int]:
        """The blocks of all groups, without null blocks."""
        return [block for table in self.block_ids for block in table if block != NULL_BLOCK]


class BlockTables:
    """Fills and empties `Request.block_ids`.

    The tables of a request are equally long in all groups: a sliding group has null blocks where others keep theirs.

    Args:
        groups: the model's cache groups; none for a model that keeps its cache itself.
        pool: where all groups take their blocks.
        block_size: tokens per block.
        weights_version: goes into the prefix digests.
        enable_prefix_caching: whether blocks are shared.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        block_size: int,
        weights_version: int,
        enable_prefix_caching: bool,
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._block_size = block_size
        self._weights_version = weights_version
        self._shares = enable_prefix_caching and bool(groups)

    def open(self, request: Request) -> None:
        """Gives a request empty tables."""
        request.block_ids = [[] for _ in self._groups]

    def peak_blocks(self, num_tokens: int, *, whole: int = 1) -> int:
        """The most blocks that a sequence holds at once until all its tokens are computed, if it runs alone.

        Args:
            num_tokens: tokens to compute.
            whole: leading tokens that must be computed in one step.
        """
        at_once = len(self._groups) * self._num_blocks(whole)
        at_the_end = sum(
            min(self._num_blocks(num_tokens), self._most_kept(group, num_tokens)) for group in self._groups
        )
        return max(at_once, at_the_end)

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest prefix that all groups hold; never the whole request, whose last token gives the logits.

        Requests for prompt log-probabilities find nothing: they need the logits of every prompt token.
        """
        if not self._shares or request.params.prompt_logprobs is not None:
            return PrefixHit(0, [[] for _ in self._groups])
        limit = (request.num_tokens - 1) // self._block_size
        digests = self._digests(request, limit)[:limit]
        num_blocks = self._shared_by_full_groups(digests)
        before = -1
        while before != num_blocks:
            before = num_blocks
            for group in self._groups:
                if group.window is not None:
                    num_blocks = self._shared_by_sliding_group(group, digests, num_blocks)
        tables = [self._hit_table(group, digests[:num_blocks]) for group in self._groups]
        return PrefixHit(num_blocks * self._block_size, tables)

    def adopt(self, request: Request, hit: PrefixHit) -> None:
        """Starts a request on the blocks that were found."""
        self._pool.touch(hit.blocks())
        request.block_ids = hit.block_ids
        request.num_computed_tokens = hit.num_tokens
        request.num_published_blocks = hit.num_tokens // self._block_size

    def room(self, request: Request) -> int:
        """How many more tokens of a request can be computed with the blocks that it has and those available."""
        if not self._groups:
            return request.num_missing_tokens
        num_blocks = len(request.block_ids[0]) + self._pool.num_available // len(self._groups)
        return num_blocks * self._block_size - request.num_computed_tokens

    def room_after(self, request: Request, hit: PrefixHit) -> int:
        """`room` of a waiting request, were it to adopt this hit."""
        if not self._groups:
            return request.num_missing_tokens
        return self._available_after(hit) // len(self._groups) * self._block_size

    def holds_whole(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request could compute all its tokens if it adopted this hit and nobody else grew."""
        num_blocks = self._num_blocks(request.num_tokens) - hit.num_tokens // self._block_size
        needed = sum(self._most_kept(group, num_blocks) for group in self._groups)
        return needed <= self._available_after(hit)

    def extend(self, request: Request, stop: int) -> list[int]:
        """Adds the blocks that positions up to `stop - 1` lack; returns them."""
        fresh: list[int] = []
        for table in request.block_ids:
            blocks = self._pool.allocate(max(0, self._num_blocks(stop) - len(table)))
            table.extend(blocks)
            fresh.extend(blocks)
        return fresh

    def publish(self, request: Request, num_computed: int) -> list[int]:
        """Registers the blocks that are full once `num_computed` tokens are computed; returns those registered.

        Where another block with the same contents is known already, the request's own stays private.
        """
        num_full = num_computed // self._block_size
        if not self._shares or num_full <= request.num_published_blocks:
            return []
        digests = self._digests(request, num_full)
        published: list[int] = []
        for index in range(request.num_published_blocks, num_full):
            for group, table in zip(self._groups, request.block_ids, strict=True):
                key = (group.index, digests[index])
                if self._pool.lookup(key) is None:
                    self._pool.register(table[index], key)
                    published.append(table[index])
        request.num_published_blocks = num_full
        return published

    def release_behind_windows(self, request: Request) -> None:
        """Releases blocks that neither the next token nor a later one sees."""
        for group, table in zip(self._groups, request.block_ids, strict=True):
            if group.window is None:
                continue
            index = max(0, request.num_computed_tokens - group.window + 1) // self._block_size - 1
            while index >= 0 and table[index] != NULL_BLOCK:
                self._pool.release((table[index],))
                table[index] = NULL_BLOCK
                index -= 1

    def release(self, request: Request) -> None:
        """Releases all blocks; of what stays cached, the tail is evicted before the head, evenly in all groups."""
        columns = zip(*(reversed(table) for table in request.block_ids), strict=True)
        self._pool.release(block for column in columns for block in column if block != NULL_BLOCK)
        self.open(request)

    def forget(self, request: Request) -> None:
        """Makes sure that nobody finds what a request computed or used, windows long passed included."""
        for digest in request.block_digests:
            for group in self._groups:
                block = self._pool.lookup((group.index, digest))
                if block is not None:
                    self._pool.forget(block)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _most_kept(self, group: CacheGroup, num_blocks: int) -> int:
        """Of so many consecutive blocks, the most that a group needs at once, wherever its window starts."""
        if group.window is None:
            return num_blocks
        return min(num_blocks, 1 if group.window == 1 else (group.window - 2) // self._block_size + 2)

    def _available_after(self, hit: PrefixHit) -> int:
        return self._pool.num_available - self._pool.num_unreferenced(hit.blocks())

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """Digests of a request's full blocks, of the first `num_blocks` at least; each is computed once."""
        digests, size = request.block_digests, self._block_size
        while len(digests) < num_blocks:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root(request)
            digests.append(block_digest(parent, request.tokens(start, start + size)))
        return digests

    def _root(self, request: Request) -> bytes:
        return root_digest(salt=request.salt, weights_version=self._weights_version, block_size=self._block_size)

    def _shared_by_full_groups(self, digests: Sequence[bytes]) -> int:
        indices = [group.index for group in self._groups if group.window is None]
        for num_blocks, digest in enumerate(digests):
            if any(self._pool.lookup((index, digest)) is None for index in indices):
                return num_blocks
        return len(digests)

    def _shared_by_sliding_group(self, group: CacheGroup, digests: Sequence[bytes], limit: int) -> int:
        """The largest number of blocks, at most `limit`, after which the whole window is there."""
        assert group.window is not None
        needed = self._num_blocks(group.window - 1)
        end, run = limit, 0
        for index in range(limit - 1, -1, -1):
            if run == needed:
                return end
            if self._pool.lookup((group.index, digests[index])) is None:
                end, run = index, 0
            else:
                run += 1
        return end

    def _hit_table(self, group: CacheGroup, digests: Sequence[bytes]) -> list[int]:
        num_tokens = len(digests) * self._block_size
        first = 0 if group.window is None else max(0, num_tokens - group.window + 1) // self._block_size
        blocks = [self._pool.lookup((group.index, digest)) for digest in digests[first:]]
        found = [block for block in blocks if block is not None]
        assert len(found) == len(blocks), "a hit counts blocks that are not cached"
        return [NULL_BLOCK] * first + found
