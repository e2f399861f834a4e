"""A program as data that can be kept on disk."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# A number that is the same in every step, or the factors of one that is not.
SizeData = int | tuple[int, int, int, int, int]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Numbers that lie one after the other in a tensor of a checkpoint.

    Attributes:
        name: of the tensor.
        start: first of them.
        count: how many.
    """

    name: str
    start: int
    count: int


class StoredView(msgspec.Struct, frozen=True, array_like=True):
    """See `View`; a view of the cache's pages is told by its layer, since it depends on how many blocks there are.

    Attributes:
        buffer: number of the buffer.
        dtype: name of torch's.
        offset: in elements.
        sizes: of dimensions.
        strides: in elements.
        layer: of the cache; -1 for any other view, and for the cache the three above are left out.
    """

    buffer: int
    dtype: str
    offset: SizeData = 0
    sizes: tuple[SizeData, ...] = ()
    strides: tuple[SizeData, ...] = ()
    layer: int = -1


class StoredBuffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `Buffer`.

    Attributes:
        kind: `input`; `value`; or of a constant, whether it lies in the checkpoint, here, or is keys or values of the
            cache.
        name: of an input.
        num_bytes: of a value.
        dtype: of a constant.
        pieces: of the checkpoint, one after the other in a constant.
        numbers: bytes of a constant that lies here.
    """

    kind: Literal["input", "value", "checkpoint", "numbers", "keys", "values"]
    name: str = ""
    num_bytes: SizeData = 0
    dtype: str = ""
    pieces: tuple[Piece, ...] = ()
    numbers: bytes = b""


class StoredNativeOp(msgspec.Struct, frozen=True, omit_defaults=True, tag="native"):
    """See `NativeOp`; of its packed weight, `weight` and `glu` are what `PackedWeight` says."""

    kernel: str
    tensors: tuple[StoredView | None, ...]
    written: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    weight: StoredView | None = None
    glu: str | None = None
    weight_index: int = -1
    name: str = ""


class StoredTorchOp(msgspec.Struct, frozen=True, tag="torch"):
    """See `TorchOp`.

    Attributes:
        name: as `aten.add.Tensor`.
        args: plain values and lists; what msgpack has no type for is a map of one entry, such as `{"dtype": "int64"}`.
        kwargs: the same by name.
        outputs: that it writes.
    """

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: tuple[StoredView, ...]


class StoredProgram(msgspec.Struct, frozen=True):
    """See `Graph`; the ops are those that run."""

    buffers: tuple[StoredBuffer, ...]
    ops: tuple[StoredNativeOp | StoredTorchOp, ...]
    output: StoredView
