"""The tensors behind recurrent layers: a row of fixed size for each running request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state that a layer keeps of a request, however long the request is.

    Attributes:
        layer: as the model numbers it when it calls.
        index: among the layer's states of this kind.
        kind: what a layer of Transformers' cache calls them: `conv_states`, the last inputs of convolutions;
            `recurrent_states`, what recurrences have come to; or something else.
        shape: of one request.
        dtype: of the state, which need not be the weights'.
    """

    layer: int
    index: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one request."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateCache:
    """States of all running requests.

    Args:
        specs: what the model keeps.
        num_rows: requests that can run at once.
        tensors: memory of the states, for each of `specs` [num_rows, *shape]; None to make it.

    Attributes:
        tensors: see above.
    """

    def __init__(
        self, specs: Sequence[StateSpec], num_rows: int, tensors: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.specs = tuple(specs)
        self.num_rows = num_rows
        if tensors is None:
            # Untouched memory is not committed by the system, and rows are zeroed when they are handed out.
            tensors = [torch.empty((num_rows, *spec.shape), dtype=spec.dtype) for spec in specs]
        self.tensors = dict(zip(self.specs, tensors, strict=True))
        self._by_layer: dict[int, dict[StateSpec, torch.Tensor]] = {}
        for spec, tensor in self.tensors.items():
            self._by_layer.setdefault(spec.layer, {})[spec] = tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * row_bytes(self.specs)

    def of_layer(self, layer: int) -> Mapping[StateSpec, torch.Tensor]:
        """Those of `tensors` that a layer keeps."""
        return self._by_layer.get(layer, {})

    def rows(self, row: int) -> list[torch.Tensor]:
        """Views [1, *shape] of one request's states, in the order of `specs`."""
        return [tensor[row : row + 1] for tensor in self.tensors.values()]

    @contextmanager
    def together(self, rows: Sequence[int]) -> Iterator[StateCache]:
        """Within it, a cache of just these rows, in this order; what is written to it has been written here at the end.

        Rows that lie side by side are lent where they lie, others are copied, and copied back.
        """
        index = as_index(rows)
        lent = StateCache(self.specs, len(rows), [tensor[index] for tensor in self.tensors.values()])
        yield lent
        if isinstance(index, torch.Tensor):
            for spec, tensor in self.tensors.items():
                tensor.index_copy_(0, index, lent.tensors[spec])

    def zero_rows(self, rows: Sequence[int]) -> None:
        """Clear rows that were just handed out, so that nothing of an earlier request, NaN included, is read."""
        if rows:
            index = torch.tensor(rows)
            for tensor in self.tensors.values():
                tensor.index_fill_(0, index, 0)


def as_index(rows: Sequence[int]) -> slice | torch.Tensor:
    """What chooses rows of a tensor: where they lie side by side, without a copy."""
    if all(row == rows[0] + offset for offset, row in enumerate(rows)):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)


def row_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes that a running request takes in a `StateCache`."""
    return sum(spec.num_bytes for spec in specs)
