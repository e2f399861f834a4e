"""The steps that a forward is recorded on: their sizes tell symbols apart, and each request has blocks of its own."""

from __future__ import annotations

import itertools

import pytest

from transfuse.engine.samples import ALL_STEPS, DECODE_STEPS, Samples
from transfuse.layers.step_context import StepContext


def _sizes(context: StepContext) -> list[int]:
    return [
        len(context.input_ids), len(context.logit_rows), len(context.seq_lens), context.block_table[0].shape[1]
    ]  # fmt: skip


def test_recorded_sizes_are_primes_and_no_two_of_a_step_are_equal() -> None:
    for context in ALL_STEPS.recorded_contexts(1, 4, 50):
        sizes = _sizes(context)
        assert len(set(sizes)) == 4
        assert all(_is_prime(size) for size in sizes), sizes


def test_decodes_have_as_many_tokens_as_requests_each_with_a_past() -> None:
    recorded, compared = DECODE_STEPS.recorded_contexts(1, 4, 50), DECODE_STEPS.compared_contexts(1, 4, 50)
    for context in (*recorded, *compared):
        tokens, _, requests, _ = _sizes(context)
        assert tokens == requests == context.num_tokens
        assert context.cu_seqlens_q.tolist() == list(range(tokens + 1)) and (context.positions > 0).all()
    for context in recorded:
        sizes = _sizes(context)
        assert len(set(sizes)) == 3 and all(_is_prime(size) for size in sizes), sizes


def _is_prime(size: int) -> bool:
    return size > 1 and all(size % n for n in range(2, size))


@pytest.mark.parametrize("samples", [ALL_STEPS, DECODE_STEPS])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_requests_have_blocks_of_their_own(num_groups: int, block_size: int, samples: Samples) -> None:
    recorded = samples.recorded_contexts(num_groups, block_size, 50)
    for context in (*recorded, *samples.compared_contexts(num_groups, block_size, 50)):
        assert context.num_tokens == len(context.input_ids) == context.cu_seqlens_q[-1]
        assert len(context.block_table) == len(context.slot_mapping) == num_groups
        assert context.input_ids.min() >= 0 and context.input_ids.max() < 50
        starts = context.cu_seqlens_q.tolist()
        used: set[int] = set()
        for table, slots in zip(context.block_table, context.slot_mapping, strict=True):
            assert table.shape[1] == context.block_table[0].shape[1]
            for request, (first, stop) in enumerate(itertools.pairwise(starts)):
                length = int(context.seq_lens[request])
                blocks = table[request, : -(-length // block_size)].tolist()
                assert 0 not in blocks and not used & set(blocks)
                used |= set(blocks)
                positions = context.positions[first:stop].tolist()
                assert positions == list(range(length - (stop - first), length))
                expected = [blocks[p // block_size] * block_size + p % block_size for p in positions]
                assert slots[first:stop].tolist() == expected
        assert max(used) <= num_groups * samples.blocks_needed(block_size)


def test_a_single_token_is_compared() -> None:
    for samples in (ALL_STEPS, DECODE_STEPS):
        assert [1, 1, 1] in [_sizes(context)[:3] for context in samples.compared_contexts(1, 4, 50)]
