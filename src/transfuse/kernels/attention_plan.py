"""Cuts the ragged attention of a step into dense pieces, from lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# A piece's scores, float32, are kept within a share of the second-level cache; gathered keys within the third's.
_MAX_SCORES = 2 * 1024 * 1024
_MAX_GATHERED_TOKENS = 32 * 1024
_MIN_TILE, _MAX_TILE = 16, 128


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that one dense product serves.

    Attributes:
        requests: i64 [r], rows of the block table.
        query_rows: first and one past the last row of the ragged batch. The piece holds either one request's
            consecutive queries, or the single queries of r consecutive requests.
        num_queries: queries per request, q.
        blocks: first and one past the last column of the block table whose keys the queries may see.
        mask: float32 [r, 1, 1, q, L]: 0 where a query sees a key and -inf elsewhere, over the L tokens of `blocks`.
    """

    requests: torch.Tensor
    query_rows: tuple[int, int]
    num_queries: int
    blocks: tuple[int, int]
    mask: torch.Tensor


@lru_cache(maxsize=16)
def plan_attention(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], window: int, block_size: int, num_heads: int
) -> tuple[Piece, ...]:
    """Pieces that cover every query of a step once.

    Every layer with the same window asks for the same plan within a step, hence the memo.

    Args:
        query_lens: new tokens of each request; single tokens first.
        seq_lens: tokens of each request with the new ones.
        window: tokens that a query sees, itself included; 0 for all.
        block_size: tokens per block.
        num_heads: query heads, for the size of the scores.
    """
    num_single = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    pieces = _decode_pieces(seq_lens[:num_single], window, block_size)
    row = num_single
    for request in range(num_single, len(query_lens)):
        pieces += _chunk_pieces(request, row, query_lens[request], seq_lens[request], window, block_size, num_heads)
        row += query_lens[request]
    return tuple(pieces)


def _first_visible(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def _decode_pieces(seq_lens: tuple[int, ...], window: int, block_size: int) -> list[Piece]:
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
        pieces.append(_decode_piece(start, seq_lens[start:stop], window, block_size))
        start = stop
    return pieces


def _blocks_of(seq_len: int, window: int, block_size: int) -> tuple[int, int]:
    return _first_visible(seq_len - 1, window) // block_size, -(-seq_len // block_size)


def _decode_piece(start: int, seq_lens: tuple[int, ...], window: int, block_size: int) -> Piece:
    spans = [_blocks_of(length, window, block_size) for length in seq_lens]
    low, high = min(first for first, _ in spans), max(last for _, last in spans)
    positions = torch.tensor(seq_lens).unsqueeze(1) - 1
    stop = start + len(seq_lens)
    return Piece(
        requests=torch.arange(start, stop),
        query_rows=(start, stop),
        num_queries=1,
        blocks=(low, high),
        mask=_mask(positions, low * block_size, high * block_size, window),
    )


def _chunk_pieces(
    request: int, row: int, query_len: int, seq_len: int, window: int, block_size: int, num_heads: int
) -> list[Piece]:
    """Tiles of a prompt's chunk: each reads only the keys that its last query sees."""
    tile = min(_MAX_TILE, max(_MIN_TILE, _MAX_SCORES // (num_heads * seq_len)))
    pieces = []
    for offset in range(0, query_len, tile):
        stop = min(query_len, offset + tile)
        first = seq_len - query_len + offset
        last = seq_len - query_len + stop - 1
        low, high = _first_visible(first, window) // block_size, last // block_size + 1
        pieces.append(
            Piece(
                requests=torch.tensor([request]),
                query_rows=(row + offset, row + stop),
                num_queries=stop - offset,
                blocks=(low, high),
                mask=_mask(torch.arange(first, last + 1).unsqueeze(0), low * block_size, high * block_size, window),
            )
        )
    return pieces


def _mask(positions: torch.Tensor, low: int, high: int, window: int) -> torch.Tensor:
    """Additive mask [r, 1, 1, q, high - low] for queries at `positions` [r, q] over keys `low`..`high`."""
    keys = torch.arange(low, high)
    visible = keys <= positions.unsqueeze(-1)
    if window:
        visible &= keys > positions.unsqueeze(-1) - window
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return mask[:, None, None]
