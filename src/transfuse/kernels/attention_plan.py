"""Cuts the ragged attention of a step into dense pieces, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A piece's scores, float32, are kept within a share of the second-level cache; gathered keys within the third's.
_MAX_SCORES = 2 * 1024 * 1024
_MAX_GATHERED_TOKENS = 32 * 1024
_MIN_TILE, _MAX_TILE = 16, 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that one dense product serves.

    Attributes:
        requests: i64 [r], rows of the block table.
        query_rows: first and one past the last row of the ragged batch. The piece holds either one request's
            consecutive queries, or the single queries of r consecutive requests.
        num_queries: queries per request, q.
        blocks: first and one past the last column of the block table whose keys the queries may see.
        tokens: first and one past the last of the tokens of `blocks` that any query sees: L of them.
        mask: [r, 1, q, L], 0 where a query sees a key and -inf elsewhere; None where all see all.
    """

    requests: torch.Tensor
    query_rows: tuple[int, int]
    num_queries: int
    blocks: tuple[int, int]
    tokens: tuple[int, int]
    mask: torch.Tensor | None


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: int,
    block_size: int,
    num_heads: int,
    dtype: torch.dtype,
) -> list[Piece]:
    """Pieces that cover every query of a step once.

    Args:
        query_lens: new tokens of each request; single tokens first.
        seq_lens: tokens of each request with the new ones.
        window: tokens that a query sees, itself included; 0 for all.
        block_size: tokens per block.
        num_heads: query heads, for the size of the scores.
        dtype: of the masks.
    """
    num_single = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    pieces = _decode_pieces(seq_lens[:num_single], window, block_size, dtype)
    row = num_single
    for request in range(num_single, len(query_lens)):
        tile = min(_MAX_TILE, max(_MIN_TILE, _MAX_SCORES // (num_heads * seq_lens[request])))
        pieces += _chunk_pieces(request, row, query_lens[request], seq_lens[request], window, block_size, tile, dtype)
        row += query_lens[request]
    return pieces


def _first_visible(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def _decode_pieces(seq_lens: Sequence[int], window: int, block_size: int, dtype: torch.dtype) -> list[Piece]:
    """Runs of neighbours whose contexts are of like size, so that padding costs at most about half."""
    pieces: list[Piece] = []
    start = 0
    while start < len(seq_lens):
        low, high = _blocks_of(seq_lens[start], window, block_size)
        widest = high - low
        narrowest = widest
        stop = start + 1
        while stop < len(seq_lens):
            first, last = _blocks_of(seq_lens[stop], window, block_size)
            low, high = min(low, first), max(high, last)
            narrowest, widest = min(narrowest, last - first), high - low
            too_large = (stop - start + 1) * widest * block_size > _MAX_GATHERED_TOKENS
            if too_large or widest > 2 * narrowest + 8:
                break
            stop += 1
        pieces.append(_decode_piece(start, seq_lens[start:stop], window, block_size, dtype))
        start = stop
    return pieces


def _blocks_of(seq_len: int, window: int, block_size: int) -> tuple[int, int]:
    return _first_visible(seq_len - 1, window) // block_size, -(-seq_len // block_size)


def _decode_piece(start: int, seq_lens: Sequence[int], window: int, block_size: int, dtype: torch.dtype) -> Piece:
    stop = start + len(seq_lens)
    spans = [_blocks_of(length, window, block_size) for length in seq_lens]
    blocks = min(first for first, _ in spans), max(last for _, last in spans)
    first = min(_first_visible(length - 1, window) for length in seq_lens)
    positions = [[length - 1] for length in seq_lens]
    return _piece(torch.arange(start, stop), (start, stop), positions, blocks, first, window, block_size, dtype)


def _chunk_pieces(
    request: int,
    row: int,
    query_len: int,
    seq_len: int,
    window: int,
    block_size: int,
    tile: int,
    dtype: torch.dtype,
) -> list[Piece]:
    """Tiles of a prompt's chunk: each reads only the keys that its last query sees."""
    pieces = []
    for offset in range(0, query_len, tile):
        stop = min(query_len, offset + tile)
        first, last = seq_len - query_len + offset, seq_len - query_len + stop - 1
        seen = _first_visible(first, window)
        blocks = seen // block_size, last // block_size + 1
        positions = [list(range(first, last + 1))]
        rows = row + offset, row + stop
        pieces.append(_piece(torch.tensor([request]), rows, positions, blocks, seen, window, block_size, dtype))
    return pieces


def _piece(
    requests: torch.Tensor,
    query_rows: tuple[int, int],
    positions: list[list[int]],
    blocks: tuple[int, int],
    first_seen: int,
    window: int,
    block_size: int,
    dtype: torch.dtype,
) -> Piece:
    """The piece of queries at `positions` [r, q], which see keys from `first_seen` on."""
    origin, stop = blocks[0] * block_size, max(map(max, positions)) + 1
    single = len(positions) == 1 and len(positions[0]) == 1
    return Piece(
        requests=requests,
        query_rows=query_rows,
        num_queries=len(positions[0]),
        blocks=blocks,
        tokens=(first_seen - origin, stop - origin),
        # One query sees all that lies between its bounds.
        mask=None if single else _mask(torch.tensor(positions), first_seen, stop, window, dtype),
    )


def _mask(positions: torch.Tensor, low: int, high: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [r, 1, q, high - low] for queries at `positions` [r, q] over keys `low`..`high`."""
    keys = torch.arange(low, high)
    visible = keys <= positions.unsqueeze(-1)
    if window:
        visible &= keys > positions.unsqueeze(-1) - window
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).unsqueeze(1)
