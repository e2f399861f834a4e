"""Makes a program of data: first its weights are read and packed, then it is bound to a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

# Registers the operations that programs may hold.
import transfuse.kernels.fused_ops
import transfuse.kernels.mla_ops
import transfuse.kernels.moe_ops
import transfuse.kernels.rotary_ops
import transfuse.kernels.torch_ops  # noqa: F401
from transfuse.cache.kv_cache import KVCache
from transfuse.kernels.cpu.library import Library
from transfuse.program.executable import Executable
from transfuse.program.graph import Buffer, Graph, TorchOp, View
from transfuse.program.native import NativeOp, PackedWeight
from transfuse.program.packed_weights import PackedWeights
from transfuse.program.sizes import Size
from transfuse.program.stored import (
    Piece,
    SizeData,
    StoredBuffer,
    StoredNativeOp,
    StoredProgram,
    StoredTorchOp,
    StoredView,
)

# Fills a tensor [n] with pieces of the checkpoint, one after the other.
Read = Callable[[Sequence[Piece], torch.Tensor], None]


class RestoredProgram:
    """A program whose weights are in memory.

    Args:
        stored: the program.
        library: kernels of the program.
        read: reads the checkpoint.
    """

    def __init__(self, stored: StoredProgram, library: Library, read: Read) -> None:
        self._stored = stored
        self._library = library
        weights = list(dict.fromkeys(_packed_weights(stored)))
        packed_only = {weight.view.buffer for weight in weights} - {view.buffer for view in _views(stored)}
        room = _Room(max((_num_bytes(stored.buffers[number]) for number in packed_only), default=0))
        self._buffers: list[Buffer] = []
        for number, buffer in enumerate(stored.buffers):
            self._buffers.append(_buffer(buffer, read, room if number in packed_only else None))
        self._weights = PackedWeights(weights, self._buffers, library)
        for number in packed_only:
            # Nobody reads them again, and with the last reader the memory goes that they were read into.
            self._buffers[number].load = None

    def bind(self, cache: KVCache) -> Executable:
        """The program on a cache.

        Args:
            cache: of the layers and the block size that it was made for.
        """
        binding = _Binding(self._stored.buffers, cache)
        for number, pages in binding.pages.items():
            self._buffers[number].tensor = next(page for page in pages if page.numel())
        graph = Graph(self._buffers, [], binding.view(self._stored.output))
        return Executable(graph, [binding.op(op) for op in self._stored.ops], self._library, self._weights)


class _Room:
    """Memory that weights are read into one after the other, each to be packed before the next one comes."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)

    def take(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[:num_bytes].view(dtype)


def _buffer(stored: StoredBuffer, read: Read, room: _Room | None) -> Buffer:
    """Args: see above; `room` where a constant is only there to be packed."""
    if stored.kind == "input":
        return Buffer("input", name=stored.name)
    if stored.kind == "value":
        return Buffer("value", num_bytes=_size(stored.num_bytes))
    if stored.kind == "numbers":
        return Buffer("constant", tensor=torch.frombuffer(bytearray(stored.numbers), dtype=_dtype(stored.dtype)))
    if stored.kind != "checkpoint":
        return Buffer("constant")
    dtype = _dtype(stored.dtype)

    def load() -> torch.Tensor:
        num_bytes = _num_bytes(stored)
        tensor = torch.empty(num_bytes // dtype.itemsize, dtype=dtype) if room is None else room.take(num_bytes, dtype)
        read(stored.pieces, tensor)
        return tensor

    return Buffer("constant", tensor=load()) if room is None else Buffer("constant", load=load)


def _num_bytes(buffer: StoredBuffer) -> int:
    return sum(piece.count for piece in buffer.pieces) * _dtype(buffer.dtype).itemsize


def _packed_weights(stored: StoredProgram) -> Iterator[PackedWeight]:
    for op in stored.ops:
        if isinstance(op, StoredNativeOp) and op.weight is not None:
            yield PackedWeight(_plain_view(op.weight), op.glu)


def _views(stored: StoredProgram) -> Iterator[StoredView]:
    """Views that ops read or write as they are."""
    yield stored.output
    for op in stored.ops:
        if isinstance(op, StoredNativeOp):
            yield from (view for view in op.tensors if view is not None)
        else:
            yield from _views_in([op.args, list(op.kwargs.values())])


def _views_in(value: Any) -> Iterator[StoredView]:
    if isinstance(value, list):
        for item in value:
            yield from _views_in(item)
    elif isinstance(value, dict) and "view" in value:
        yield msgspec.convert(value["view"], StoredView)


class _Binding:
    """Makes ops of stored ones, on a cache.

    Attributes:
        pages: of each layer, by number of the buffer.
    """

    def __init__(self, buffers: Sequence[StoredBuffer], cache: KVCache) -> None:
        kinds = {"keys": cache.keys, "values": cache.values}
        self.pages = {number: kinds[b.kind] for number, b in enumerate(buffers) if b.kind in kinds}

    def op(self, op: StoredNativeOp | StoredTorchOp) -> NativeOp | TorchOp:
        if isinstance(op, StoredTorchOp):
            args = tuple(self._argument(value) for value in op.args)
            kwargs = {name: self._argument(value) for name, value in op.kwargs.items()}
            return TorchOp(_torch_op(op.name), args, kwargs, tuple(map(self.view, op.outputs)))
        return NativeOp(
            kernel=op.kernel,
            tensors=[None if view is None else self.view(view) for view in op.tensors],
            written=op.written,
            ints=list(op.ints),
            floats=list(op.floats),
            weight=None if op.weight is None else PackedWeight(_plain_view(op.weight), op.glu),
            weight_index=op.weight_index,
            name=op.name,
        )

    def view(self, view: StoredView) -> View:
        if view.layer < 0:
            return _plain_view(view)
        page = self.pages[view.buffer][view.layer]
        sizes, strides = map(Size.of, page.shape), map(Size.of, page.stride())
        return View(view.buffer, page.dtype, Size.of(int(page.storage_offset())), tuple(sizes), tuple(strides))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "view":
            return self.view(msgspec.convert(inner, StoredView))
        if kind == "size":
            return _size(inner)
        return torch.device(inner) if kind == "device" else getattr(torch, inner)


def _torch_op(qualified: str) -> torch._ops.OpOverload:
    namespace, name, overload = qualified.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def _plain_view(view: StoredView) -> View:
    sizes, strides = tuple(map(_size, view.sizes)), tuple(map(_size, view.strides))
    return View(view.buffer, _dtype(view.dtype), _size(view.offset), sizes, strides)


def _size(data: SizeData) -> Size:
    if isinstance(data, int):
        return Size.of(data)
    constant, tokens, rows, requests, blocks = data
    return Size((constant, tokens, rows, requests, blocks))


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
