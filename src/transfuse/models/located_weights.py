"""Finds out which tensors of a checkpoint the weights in memory are, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from transfuse.models.checkpoint import Checkpoint
from transfuse.program.stored import Piece

# First numbers of a tensor that tell it from others, where its name does not.
_HEAD = 16


@dataclass(frozen=True, slots=True)
class _Weight:
    start: int
    stop: int
    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)


class LocatedWeights:
    """The parameters of a module, and the checkpoint that they were read from.

    A parameter is one tensor of the checkpoint, most often of its own name, or several one after the other, as the
    experts of a layer are. The numbers decide: what Transformers converts as it loads is not found.

    Args:
        module: its parameters have their numbers.
        checkpoint: that it was loaded from.
    """

    def __init__(self, module: nn.Module, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        weights: dict[int, _Weight] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            data = parameter.data
            if data.is_contiguous() and data.numel():
                start = data.data_ptr()
                weights.setdefault(start, _Weight(start, start + data.nbytes, data.view(-1))).names.append(name)
        self._weights = [weights[start] for start in sorted(weights)]
        self._pieces_of = cache(self._found)
        self._names_by_head = cache(self._heads)

    def pieces(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Piece, ...] | None:
        """Where the numbers of a stretch of memory lie in the checkpoint; None where not all of them do.

        Args:
            start: address of the first.
            stop: one past the last.
            dtype: of the numbers.
        """
        found: list[Piece] = []
        position = start
        for index, weight in enumerate(self._weights):
            if weight.stop <= position or position >= stop:
                continue
            if weight.start > position or weight.tensor.dtype is not dtype:
                return None
            pieces = self._pieces_of(index)
            if pieces is None:
                return None
            end = min(weight.stop, stop)
            found += _part(pieces, (position - weight.start) // dtype.itemsize, (end - weight.start) // dtype.itemsize)
            position = end
        return tuple(found) if position == stop else None

    def _found(self, index: int) -> list[Piece] | None:
        """The pieces that a whole weight consists of."""
        weight = self._weights[index]
        pieces: list[Piece] = []
        position, total = 0, weight.tensor.numel()
        while position < total:
            rest = weight.tensor[position:]
            candidates = self._candidates(rest, () if position else weight.names)
            name = next((name for name in candidates if self._is(name, rest)), None)
            if name is None:
                return None
            count = self._checkpoint.num_elements[name]
            pieces.append(Piece(name, 0, count))
            position += count
        return pieces

    def _candidates(self, numbers: torch.Tensor, names: Sequence[str]) -> Iterator[str]:
        sizes = self._checkpoint.num_elements
        yield from (name for name in names if 0 < sizes.get(name, 0) <= len(numbers))
        heads = self._names_by_head(numbers.dtype)
        for length in range(min(_HEAD, len(numbers)), 0, -1):
            named = heads.get(_bits(numbers[:length]), ())
            # The largest first: a smaller one may be its beginning by chance.
            yield from (n for n in sorted(named, key=lambda n: -sizes[n]) if sizes[n] <= len(numbers))

    def _heads(self, dtype: torch.dtype) -> dict[bytes, list[str]]:
        heads: dict[bytes, list[str]] = {}
        for name, count in self._checkpoint.num_elements.items():
            if count:
                head = torch.empty(min(_HEAD, count), dtype=dtype)
                self._checkpoint.read(name, 0, head)
                heads.setdefault(_bits(head), []).append(name)
        return heads

    def _is(self, name: str, numbers: torch.Tensor) -> bool:
        """Whether `numbers` begins with all of a tensor of the checkpoint."""
        count = self._checkpoint.num_elements[name]
        stored = torch.empty(count, dtype=numbers.dtype)
        self._checkpoint.read(name, 0, stored)
        return torch.equal(stored.view(torch.uint8), numbers[:count].view(torch.uint8))


def _part(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Of numbers that lie in pieces one after the other, those from `start` to `stop`."""
    position = 0
    for piece in pieces:
        first, last = max(start - position, 0), min(stop - position, piece.count)
        if first < last:
            yield Piece(piece.name, piece.start + first, last - first)
        position += piece.count


def _bits(numbers: torch.Tensor) -> bytes:
    return numbers.contiguous().view(torch.uint8).numpy().tobytes()
