"""Plays the model runner for scheduler tests: every slot holds which token, after which prefix, was written there."""

from __future__ import annotations

from collections.abc import Sequence

from transfuse.cache.block_pool import BlockPool
from transfuse.cache.groups import CacheGroup
from transfuse.config import SchedulerConfig
from transfuse.engine.request import Request
from transfuse.engine.scheduler import Batch, ScheduledRequest, Scheduler
from transfuse.sampling_params import SamplingParams

EOS = 99
POISON = -1


def full(index: int) -> CacheGroup:
    return CacheGroup(index, "full", None, (index,))


def sliding(index: int, window: int) -> CacheGroup:
    return CacheGroup(index, "sliding", window, (index,))


def make_config(**fields: object) -> SchedulerConfig:
    defaults = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4}
    return SchedulerConfig(**{**defaults, **fields})


def make_scheduler(groups: Sequence[CacheGroup], num_blocks: int, **fields: object) -> Scheduler:
    """A scheduler whose pool has `num_blocks` blocks to hand out."""
    return Scheduler(make_config(**fields), groups, num_blocks + 1)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    params: SamplingParams | None = None,
    **fields: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=params or SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}),
        arrival_time=0.0,
        **fields,
    )


class SimulatedCache:
    """Slots by block and offset. A slot's contents stand for its group and for all tokens up to its own.

    With `keeps_states` there are rows beside, each of which stands for all tokens that it has come through.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, *, keeps_states: bool = False) -> None:
        self.groups = groups
        self.block_size = block_size
        self.slots: dict[int, dict[int, object]] = {}
        self.states: dict[int, object] | None = {} if keeps_states else None

    def run(self, batch: Batch) -> None:
        """Write the batch's tokens, then check all that its attention reads."""
        for block in batch.fresh_blocks:
            self.slots[block] = {}
        for entry in batch.entries:
            self._write(entry)
        for entry in batch.entries:
            self._read(entry)
        if self.states is not None:
            self._advance(self.states, batch)

    def fail(self, batch: Batch) -> None:
        """A step that breaks down after it wrote garbage."""
        for entry in batch.entries:
            for position in range(entry.start, entry.start + entry.num_tokens):
                for table in entry.request.block_ids:
                    self.slots.setdefault(table[position // self.block_size], {})[position % self.block_size] = POISON
            if self.states is not None:
                self.states[entry.request.state_row] = POISON

    def check_keys(self, pool: BlockPool) -> None:
        """Assert that whatever can be found was written, by a step that went well."""
        for block in pool._key_of:
            slots = self.slots[block]
            assert len(slots) == self.block_size and POISON not in slots.values(), (
                f"block {block} is found, holds {slots}"
            )

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.slots[block] = dict.fromkeys(range(self.block_size), POISON)

    def _advance(self, states: dict[int, object], batch: Batch) -> None:
        for row in batch.fresh_rows:
            states[row] = None
        rows = [entry.request.state_row for entry in batch.entries]
        assert None not in rows and len(set(rows)) == len(rows), f"two requests write one state row: {rows}"
        for entry in batch.entries:
            prefixes, row = prefix_hashes(entry.request), entry.request.state_row
            before = prefixes[entry.start - 1] if entry.start else None
            assert states[row] == before, f"{entry} goes on from {states[row]}, expected {before}"
            states[row] = prefixes[entry.start + entry.num_tokens - 1]

    def _write(self, entry: ScheduledRequest) -> None:
        prefixes = prefix_hashes(entry.request)
        for position in range(entry.start, entry.start + entry.num_tokens):
            for group, table in zip(self.groups, entry.request.block_ids, strict=True):
                block, offset = table[position // self.block_size], position % self.block_size
                assert block != 0, f"{entry} writes position {position} to the null block of group {group.index}"
                assert offset not in self.slots[block], f"{entry} overwrites position {position} in group {group.index}"
                self.slots[block][offset] = (group.index, prefixes[position])

    def _read(self, entry: ScheduledRequest) -> None:
        prefixes = prefix_hashes(entry.request)
        for group, table in zip(self.groups, entry.request.block_ids, strict=True):
            first = 0 if group.window is None else max(0, entry.start - group.window + 1)
            for position in range(first, entry.start + entry.num_tokens):
                block = table[position // self.block_size]
                assert block != 0, f"{entry} reads position {position} from the null block of group {group.index}"
                found = self.slots[block].get(position % self.block_size)
                assert found == (group.index, prefixes[position]), f"{entry} reads {found} at {position}, {group}"


def prefix_hashes(request: Request) -> list[int]:
    """Per position, a hash of the salt and of all tokens up to it."""
    state, hashes = hash(request.salt), []
    for token in request.tokens(0, request.num_tokens):
        state = hash((state, token))
        hashes.append(state)
    return hashes


def run_step(
    scheduler: Scheduler, cache: SimulatedCache, budget: int = 64, token: int = 1
) -> tuple[Batch, list[Request]]:
    """One step that goes well; every request that samples gets `token`."""
    batch = scheduler.schedule(budget)
    cache.run(batch)
    finished = scheduler.update(batch, {e.request.request_id: token for e in batch.entries if e.samples})
    scheduler.check()
    cache.check_keys(scheduler.pool)
    return batch, finished


def drain(scheduler: Scheduler, cache: SimulatedCache, budget: int = 64, limit: int = 2000) -> list[Request]:
    """Step until nothing is left; return what finished, in order."""
    finished: list[Request] = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            break
        batch, done = run_step(scheduler, cache, budget)
        assert batch.entries, "an empty batch while requests are unfinished"
        finished += done
    assert not scheduler.has_unfinished, "requests starve"
    assert scheduler.pool.num_referenced == 0
    return finished
