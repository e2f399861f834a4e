"""The weights of a program, in the layout that its kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.packing import (
    PackedLinear,
    pack_linear,
    packed_bytes,
    unpack_linear,
    weight_buffer,
    worthwhile_exponents,
)
from transfuse.program.graph import Buffer, TorchOp, View
from transfuse.program.native import NativeOp, PackedWeight
from transfuse.program.views import disjoint


def weights_of(ops: Iterable[NativeOp | TorchOp]) -> list[PackedWeight]:
    """The packed weights of ops, each once, in the order of their first use."""
    return list(dict.fromkeys(op.weight for op in ops if isinstance(op, NativeOp) and op.weight is not None))


class PackedWeights:
    """Weights packed in the order in which they are used, side by side in one buffer; exponents coded where it pays.

    Args:
        weights: each once.
        buffers: that they lie in.
        library: whose kernels read them.
        release: is given each weight once it is packed and nobody else reads it, to free its memory; None to keep all.
        read: views that ops read as they are.

    Attributes:
        packed: by weight.
    """

    def __init__(
        self,
        weights: Sequence[PackedWeight],
        buffers: Sequence[Buffer],
        library: Library,
        release: Callable[[torch.Tensor], None] | None = None,
        read: Sequence[View] = (),
    ) -> None:
        self._buffers = buffers
        self._library = library
        self._released: list[PackedWeight] = []
        self.packed: dict[PackedWeight, PackedLinear] = {}
        # How small a weight becomes is known once its numbers are; what of the buffer is never written takes no memory.
        left = weight_buffer(sum(map(self.plain_bytes, weights)))
        for index, weight in enumerate(weights):
            # One at a time: the matrix may have been read from a file just for this.
            matrix = self._matrix(weight.view)
            exponents = worthwhile_exponents(library, matrix, weight.glu)
            num_bytes = self.plain_bytes(weight) if exponents is None else exponents.num_bytes
            part, left = left[:num_bytes], left[num_bytes:]
            self.packed[weight] = pack_linear(library, matrix, weight.glu, exponents=exponents, out=part)
            # Others may be packed of the same rows, in another layout or joined with more.
            needed = (*read, *(other.view for other in weights[index + 1 :]))
            if release is not None and _is_dense(matrix) and all(disjoint(weight.view, view) for view in needed):
                self._released.append(weight)
                release(matrix)

    def restore(self) -> None:
        """Give weights that were released their numbers back."""
        for weight in self._released:
            self._matrix(weight.view).copy_(unpack_linear(self._library, self.packed[weight]))
        self._released.clear()

    def plain_bytes(self, weight: PackedWeight) -> int:
        """Bytes of a weight whose numbers are kept as they are."""
        rows, columns = (size.constant for size in weight.view.sizes)
        return packed_bytes(self._library, rows, columns, weight.view.dtype, weight.glu)

    def _matrix(self, view: View) -> torch.Tensor:
        buffer = self._buffers[view.buffer]
        tensor = buffer.tensor if buffer.load is None else buffer.load()
        assert tensor is not None
        sizes, strides = [s.constant for s in view.sizes], [s.constant for s in view.strides]
        return torch.as_strided(tensor.detach(), sizes, strides, view.offset.constant)


def _is_dense(matrix: torch.Tensor) -> bool:
    """Whether its memory holds nothing but it."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()
