"""The pieces of a step: every query once, each seeing exactly the keys that it may."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transfuse.kernels.attention_plan import (
    _MAX_GATHERED_TOKENS,
    _MAX_SCORES,
    _MAX_TILE,
    _MIN_TILE,
    Piece,
    plan_attention,
)

Lens = list[tuple[int, int]]


def _seen(piece: Piece, row: int, query: int, block_size: int) -> set[int]:
    """Positions that a piece lets a query see."""
    origin = piece.blocks[0] * block_size
    positions = range(origin + piece.tokens[0], origin + piece.tokens[1])
    if piece.mask is None:
        return set(positions)
    assert set(piece.mask[row, 0, query].unique().tolist()) <= {0.0, float("-inf")}
    return {p for p, bias in zip(positions, piece.mask[row, 0, query].tolist(), strict=True) if bias == 0.0}


lens = st.tuples(
    st.lists(st.integers(0, 200), max_size=8).map(lambda contexts: [(1, c) for c in contexts]),
    st.lists(st.tuples(st.integers(2, 150), st.integers(0, 80)), max_size=3),
).map(lambda parts: parts[0] + parts[1])


@settings(max_examples=120, deadline=None)
@example(requests=[], window=0, block_size=16)
@given(requests=lens, window=st.integers(0, 40), block_size=st.sampled_from([1, 3, 16]))
def test_every_query_sees_what_it_may_and_nothing_else(requests: Lens, window: int, block_size: int) -> None:
    query_lens = [q for q, _ in requests]
    seq_lens = [q + c for q, c in requests]
    pieces = plan_attention(query_lens, seq_lens, window, block_size, 4, torch.float32)
    # The ragged batch's rows, in order: request and position of each.
    rows = [(r, seq_lens[r] - q + i) for r, q in enumerate(query_lens) for i in range(q)]
    next_row = 0
    for piece in pieces:
        first, stop = piece.query_rows
        assert first == next_row, "pieces follow each other without gaps"
        next_row = stop
        assert stop - first == len(piece.requests) * piece.num_queries
        for row in range(first, stop):
            index, query = divmod(row - first, piece.num_queries)
            request, position = rows[row]
            assert piece.requests[index] == request
            lowest = max(0, position - window + 1) if window else 0
            assert _seen(piece, index, query, block_size) == set(range(lowest, position + 1))
        assert 0 <= piece.tokens[0] < piece.tokens[1] <= (piece.blocks[1] - piece.blocks[0]) * block_size
        longest = max(seq_lens[r] for r in piece.requests.tolist())
        assert piece.blocks[1] * block_size < longest + block_size, "no column that the table lacks"
    assert next_row == len(rows)


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.sampled_from([0, 1, 15, 16, 100, 1000, 5000, 20000]), min_size=1, max_size=40),
    window=st.sampled_from([0, 100]),
)
def test_decodes_are_gathered_with_little_padding(contexts: list[int], window: int) -> None:
    seq_lens = [c + 1 for c in contexts]
    for piece in plan_attention([1] * len(contexts), seq_lens, window, 16, 4, torch.float32):
        width = piece.blocks[1] - piece.blocks[0]
        requests = piece.requests.tolist()
        if len(requests) > 1:
            assert len(requests) * width * 16 <= _MAX_GATHERED_TOKENS
            own = [-(-seq_lens[r] // 16) - (max(0, seq_lens[r] - window) // 16 if window else 0) for r in requests]
            assert width <= 2 * min(own) + 8


@settings(max_examples=20, deadline=None)
@given(
    num_queries=st.integers(2, 300),
    context=st.sampled_from([0, 500, 4000, 12000]),
    num_heads=st.sampled_from([1, 8, 64]),
)
def test_tiles_keep_their_scores_small(num_queries: int, context: int, num_heads: int) -> None:
    for piece in plan_attention([num_queries], [num_queries + context], 0, 16, num_heads, torch.float32):
        assert piece.num_queries <= _MAX_TILE
        num_scores = num_heads * piece.num_queries * (piece.tokens[1] - piece.tokens[0])
        assert num_scores <= _MAX_SCORES or piece.num_queries <= _MIN_TILE


def test_a_window_reads_only_its_blocks() -> None:
    (piece,) = plan_attention([1], [1000], 32, 16, 4, torch.float32)
    assert piece.blocks == (60, 63)
    assert piece.tokens == (8, 40)
    tiles = plan_attention([64], [1000], 32, 16, 4, torch.float32)
    assert all(tile.blocks[1] - tile.blocks[0] <= (32 + _MAX_TILE) // 16 + 2 for tile in tiles)


def test_masks_are_of_the_dtype_asked_for_and_left_out_for_one_query() -> None:
    alone, chunk = plan_attention([1, 8], [50, 8], 0, 16, 4, torch.bfloat16)
    assert alone.mask is None
    assert chunk.mask is not None and chunk.mask.dtype == torch.bfloat16
    assert chunk.mask.shape == (1, 1, 8, 8)
