"""Small steps on which a forward is recorded, and its program compared with it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from transfuse.layers.step_context import StepContext


class _Sample(NamedTuple):
    """New and earlier tokens of each request, rows of logits, and the least width of the block table."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    num_rows: int
    width: int

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-(new + past) // block_size) for new, past in zip(self.new, self.past, strict=True))


# Numbers of tokens, rows, requests and blocks are different primes, so that each size of a recording tells which of
# them it follows. They do not lie on a line: no product, sum or difference of two fits the multiple of one.
_RECORDED = (
    _Sample((1, 4, 14), (3, 0, 2), 7, 31),
    _Sample((1, 1, 2, 3, 22), (9, 3, 0, 5, 0), 11, 43),
    _Sample((16, 21), (2, 0), 17, 23),
)
_COMPARED = (
    _Sample((1,), (5,), 1, 1),
    _Sample((1, 1), (0, 11), 2, 2),
)
# The same where every request goes on by one token: as many tokens as requests.
_RECORDED_DECODES = (
    _Sample((1,) * 5, (3, 9, 1, 5, 2), 3, 31),
    _Sample((1,) * 7, (4, 1, 11, 2, 6, 3, 1), 2, 43),
    _Sample((1,) * 11, (2, 3, 1, 3, 2, 1, 2, 9, 1, 1, 3), 5, 23),
)
_COMPARED_DECODES = (
    _Sample((1,), (5,), 1, 1),
    _Sample((1, 1), (1, 11), 2, 2),
)


@dataclass(frozen=True)
class Samples:
    """Steps of one kind.

    Attributes:
        to_record: those that a program is made of.
        to_compare: those of few tokens that it is compared on beside.
    """

    to_record: tuple[_Sample, ...]
    to_compare: tuple[_Sample, ...]

    def recorded_contexts(self, num_groups: int, block_size: int, vocab_size: int) -> list[StepContext]:
        """Steps to record."""
        return [_context(sample, num_groups, block_size, vocab_size) for sample in self.to_record]

    def compared_contexts(self, num_groups: int, block_size: int, vocab_size: int) -> list[StepContext]:
        """Steps to compare beside those."""
        return [_context(sample, num_groups, block_size, vocab_size) for sample in self.to_compare]

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that they use in each cache group, beside block 0."""
        return max(sample.num_blocks(block_size) for sample in (*self.to_record, *self.to_compare))


ALL_STEPS = Samples(_RECORDED, _COMPARED)
DECODE_STEPS = Samples(_RECORDED_DECODES, _COMPARED_DECODES)


def _context(sample: _Sample, num_groups: int, block_size: int, vocab_size: int) -> StepContext:
    new, past = sample.new, sample.past
    cu_seqlens = [0, *itertools.accumulate(new)]
    num_tokens = cu_seqlens[-1]
    positions = torch.cat([torch.arange(p, p + n) for n, p in zip(new, past, strict=True)])
    longest = max(n + p for n, p in zip(new, past, strict=True))
    table = torch.zeros(len(new), max(sample.width, -(-longest // block_size)), dtype=torch.int32)
    block = 1
    for request, length in enumerate(n + p for n, p in zip(new, past, strict=True)):
        used = -(-length // block_size)
        table[request, :used] = torch.arange(block, block + used)
        block += used
    tables = [torch.where(table > 0, table + group * (block - 1), 0) for group in range(num_groups)]
    owner = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    blocks = [group_table[owner, positions // block_size].long() for group_table in tables]
    return StepContext(
        # From the middle: the first are often special tokens, on which an untrained part of a model is chaotic.
        input_ids=vocab_size // 3 + torch.arange(num_tokens) * 131 % max(vocab_size // 2, 1),
        positions=positions,
        num_tokens=num_tokens,
        cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32),
        seq_lens=torch.tensor([n + p for n, p in zip(new, past, strict=True)], dtype=torch.int32),
        block_table=tuple(tables),
        slot_mapping=tuple(of_group * block_size + positions % block_size for of_group in blocks),
        logit_rows=torch.arange(num_tokens - sample.num_rows, num_tokens),
    )
