"""How long a request may be and how many blocks the cache gets, from the memory that is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from transfuse.cache.groups import CacheGroup
from transfuse.config import CacheConfig
from transfuse.errors import ConfigError

log = logging.getLogger(__name__)

_GIB = 2**30
# A pool's least: nobody asks it for blocks where no layer keeps keys and values.
_NO_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What was decided.

    Attributes:
        max_model_len: most tokens of a request.
        num_blocks: blocks of the pool, the null block included.
        num_bytes: what the pool takes when full, and all states.
        num_tokens: tokens that fit, over all requests, at the full length of each.
        max_num_seqs: requests at once: those that were asked for, or those whose states fit.
    """

    max_model_len: int
    num_blocks: int
    num_bytes: int
    num_tokens: int
    max_num_seqs: int

    @property
    def num_full_requests(self) -> float:
        """Requests of `max_model_len` tokens that fit at once."""
        return self.num_tokens / self.max_model_len


def size_cache(
    config: CacheConfig,
    groups: Sequence[CacheGroup],
    *,
    bytes_per_block: int,
    bytes_per_state: int = 0,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_chunk: int,
) -> CacheSize:
    """Decide the length of requests and the number of blocks.

    The pool takes what `max_num_seqs` requests of full length could use, as far as its share of memory allows.

    Args:
        config: block size, and what the caller said of the memory.
        groups: the model's cache groups.
        bytes_per_block: bytes of one block.
        bytes_per_state: bytes that a running request takes beside its blocks.
        model_max_len: the model's own limit in tokens.
        max_model_len: the caller's limit; None takes the model's, or what fits.
        max_num_seqs: requests at once.
        max_chunk: most tokens of a request in a step: a sliding window's blocks are freed only between steps.

    Raises:
        ConfigError: a limit is above the model's, or not even one request of full length fits.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model was made for {model_max_len} tokens. Lower it."
        )
    length = max_model_len or model_max_len

    def per_request(tokens: int) -> int:
        return sum(_blocks_of(group, tokens, config.block_size, max_chunk) for group in groups)

    if bytes_per_state:
        max_num_seqs = _num_states(config, bytes_per_state, max_num_seqs, shares_memory=bool(groups))
    state_bytes = max_num_seqs * bytes_per_state
    if not groups:
        # The states are all there is, and a request's are as large whatever its length.
        return CacheSize(length, _NO_BLOCKS, state_bytes, max_num_seqs * length, max_num_seqs)
    available = _budget(config, bytes_per_block, state_bytes)
    num_usable = available - 1
    if per_request(length) > num_usable:
        fitting = _longest_fitting(length, num_usable, per_request)
        if max_model_len is not None or fitting < config.block_size:
            raise ConfigError(_too_small(length, per_request(length), num_usable, bytes_per_block, fitting))
        log.warning("the cache holds requests of up to %d tokens; the model would take %d", fitting, length)
        length = fitting
    wanted = per_request(length) * max_num_seqs
    # A cache of the model's own has no blocks to fill memory with: they only count tokens.
    explicit = config.num_blocks is not None or (config.memory_bytes is not None and bytes_per_block > 0)
    num_usable = num_usable if explicit else min(num_usable, wanted)
    num_tokens = num_usable * length // per_request(length)
    num_bytes = (num_usable + 1) * bytes_per_block + state_bytes
    return CacheSize(length, num_usable + 1, num_bytes, num_tokens, max_num_seqs)


def _blocks_of(group: CacheGroup, num_tokens: int, block_size: int, max_chunk: int) -> int:
    kept = num_tokens if group.window is None else min(num_tokens, group.window + max_chunk + block_size)
    return -(-kept // block_size)


def _num_states(config: CacheConfig, bytes_per_state: int, max_num_seqs: int, *, shares_memory: bool) -> int:
    """Running requests whose states fit in the cache's memory, or in half of it where blocks need the rest."""
    num_bytes = _memory(config) // (2 if shares_memory else 1)
    fitting = num_bytes // bytes_per_state
    if fitting < 1:
        raise ConfigError(
            f"A running request needs {bytes_per_state / _GIB:.2f} GiB for its states; the cache has "
            f"{num_bytes / _GIB:.2f} GiB for them. Give the cache more memory (kv_cache_memory_bytes)."
        )
    if fitting < max_num_seqs:
        log.warning("the cache holds the states of %d requests at once; asked for were %d", fitting, max_num_seqs)
    return min(fitting, max_num_seqs)


def _budget(config: CacheConfig, bytes_per_block: int, state_bytes: int) -> int:
    """Blocks that the caller or the memory, beside the states, allow."""
    if config.num_blocks is not None:
        return config.num_blocks
    if bytes_per_block == 0:
        return 2**31
    return (_memory(config) - state_bytes) // bytes_per_block


def _memory(config: CacheConfig) -> int:
    """Bytes for the whole cache."""
    if config.memory_bytes is not None:
        return config.memory_bytes
    return int(available_memory() * config.memory_share)


def _longest_fitting(length: int, num_usable: int, per_request: Callable[[int], int]) -> int:
    """The longest request that `num_usable` blocks hold; by bisection, since windows make it no plain division."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if per_request(middle) <= num_usable else (low, middle - 1)
    return low


def _too_small(length: int, needed: int, num_usable: int, bytes_per_block: int, fitting: int) -> str:
    return (
        f"A request of max_model_len={length} tokens needs {needed} cache blocks "
        f"({needed * bytes_per_block / _GIB:.2f} GiB); the cache has {max(0, num_usable)} "
        f"({max(0, num_usable) * bytes_per_block / _GIB:.2f} GiB, of {available_memory() / _GIB:.2f} GiB available). "
        f"Set max_model_len to {fitting} or less, or give the cache more memory (kv_cache_memory_bytes)."
    )


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's where that is less."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)
