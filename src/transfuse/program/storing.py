"""Turns a program into data: what depends on this process, such as addresses, is told by where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transfuse.cache.kv_cache import KVCache
from transfuse.program.errors import StoreError
from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import NativeOp
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

# From the address of a stretch of memory, one past its end, and its dtype to where its numbers lie in the checkpoint.
Locate = Callable[[int, int, torch.dtype], tuple[Piece, ...] | None]

# Tables of angles are kept with the program; weights are not.
_MAX_NUMBERS, _MAX_ALL_NUMBERS = 4 << 20, 32 << 20
# Operations of other libraries need not be there the next time.
_NAMESPACES = ("aten", "transfuse")


def store(graph: Graph, ops: Sequence[NativeOp | TorchOp], cache: KVCache, locate: Locate) -> StoredProgram:
    """A program as data.

    Args:
        graph: that the ops are of; its constants have their numbers.
        ops: in order.
        cache: that the program reads and writes.
        locate: finds weights in the checkpoint.

    Raises:
        StoreError: it depends on something that the next process would not have.
    """
    return _Storing(graph, cache, locate).program(ops)


class _Storing:
    def __init__(self, graph: Graph, cache: KVCache, locate: Locate) -> None:
        self._graph = graph
        self._locate = locate
        self._buffers: list[StoredBuffer] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._num_numbers = 0
        # By the view itself: layers of several groups may share one.
        self._pages: dict[tuple[object, ...], tuple[Any, int]] = {}
        for kind, pages in (("keys", cache.keys), ("values", cache.values)):
            for layer, page in enumerate(pages):
                self._pages.setdefault(_page_key(page), (kind, layer))
        self._cached = {page.untyped_storage().data_ptr() for page in (*cache.keys, *cache.values) if page.numel()}

    def program(self, ops: Sequence[NativeOp | TorchOp]) -> StoredProgram:
        for op in ops:
            for view in op.writes():
                buffer = self._graph.buffers[view.buffer]
                if buffer.kind == "constant" and self._address(view) not in self._cached:
                    raise StoreError("it changes a constant other than the cache")
        stored = tuple(self._native(op) if isinstance(op, NativeOp) else self._torch(op) for op in ops)
        return StoredProgram(output=self._view(self._graph.output), ops=stored, buffers=tuple(self._buffers))

    def _native(self, op: NativeOp) -> StoredNativeOp:
        return StoredNativeOp(
            kernel=op.kernel,
            tensors=tuple(None if view is None else self._view(view) for view in op.tensors),
            written=op.written,
            ints=tuple(op.ints),
            floats=tuple(op.floats),
            weight=None if op.weight is None else self._view(op.weight.view),
            glu=None if op.weight is None else op.weight.glu,
            weight_index=op.weight_index,
            name=op.name,
        )

    def _torch(self, op: TorchOp) -> StoredTorchOp:
        if op.name.split(".")[0] not in _NAMESPACES:
            raise StoreError(f"{op.name} is an operation of another library")
        kwargs = {name: self._argument(value) for name, value in op.kwargs.items()}
        outputs = tuple(self._view(view) for view in op.outputs)
        return StoredTorchOp(op.name, [self._argument(value) for value in op.args], kwargs, outputs)

    def _argument(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, View):
            return {"view": self._view(value)}
        if isinstance(value, Size):
            return {"size": _size(value)}
        for kind in (torch.dtype, torch.layout, torch.memory_format):
            if isinstance(value, kind):
                return {kind.__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device) and value.type == "cpu":
            return {"device": "cpu"}
        raise StoreError(f"an operation takes a {type(value).__name__}")

    def _view(self, view: View) -> StoredView:
        buffer = self._graph.buffers[view.buffer]
        dtype = _name(view.dtype)
        if buffer.kind == "constant":
            return self._constant(view)
        number = self._number(
            (view.buffer,),
            lambda: StoredBuffer(
                kind="input" if buffer.kind == "input" else "value",
                name=buffer.name,
                num_bytes=0 if buffer.num_bytes is None else _size(buffer.num_bytes),
            ),
        )
        sizes, strides = map(_size, view.sizes), map(_size, view.strides)
        return StoredView(number, dtype, _size(view.offset), tuple(sizes), tuple(strides))

    def _constant(self, view: View) -> StoredView:
        address, dtype = self._address(view), _name(view.dtype)
        offset, sizes, strides = _size(view.offset), tuple(map(_size, view.sizes)), tuple(map(_size, view.strides))
        page = self._pages.get((address, view.dtype, offset, sizes, strides))
        if page is not None:
            kind, layer = page
            number = self._number((kind,), lambda: StoredBuffer(kind=kind, dtype=dtype))
            return StoredView(number, dtype, layer=layer)
        if address in self._cached:
            raise StoreError("it reads the cache in another way than page by page")
        first, count = self._extent(view)
        start = address + first * view.dtype.itemsize
        number = self._number((start, count, dtype), lambda: self._constant_buffer(start, count, view))
        return StoredView(number, dtype, _size(view.offset.minus(Size.of(first))), sizes, strides)

    def _extent(self, view: View) -> tuple[int, int]:
        """The first number of a constant that is read, in whatever step, and how many follow up to the last."""
        spans = [
            (size, stride) for size, stride in zip(view.sizes, view.strides, strict=True) if not stride.is_number(0)
        ]
        if view.offset.is_constant and all(size.is_constant and stride.is_constant for size, stride in spans):
            if any(size.is_number(0) for size, _ in spans):
                raise StoreError("a constant is empty")
            return view.offset.constant, 1 + sum((size.constant - 1) * stride.constant for size, stride in spans)
        # Which part of it depends on the step.
        tensor = self._graph.buffers[view.buffer].tensor
        assert tensor is not None
        return 0, tensor.untyped_storage().nbytes() // view.dtype.itemsize

    def _constant_buffer(self, start: int, count: int, view: View) -> StoredBuffer:
        num_bytes, dtype = count * view.dtype.itemsize, _name(view.dtype)
        pieces = self._locate(start, start + num_bytes, view.dtype)
        if pieces is not None:
            return StoredBuffer(kind="checkpoint", dtype=dtype, pieces=pieces)
        self._num_numbers += num_bytes
        if num_bytes > _MAX_NUMBERS or self._num_numbers > _MAX_ALL_NUMBERS:
            raise StoreError(
                f"it reads {num_bytes} bytes of numbers that the model's files do not have as they are: weights that "
                "are converted as they are loaded, or a large table"
            )
        tensor = self._graph.buffers[view.buffer].tensor
        assert tensor is not None
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, start - storage.data_ptr(), (num_bytes,), (1,))
        return StoredBuffer(kind="numbers", dtype=dtype, numbers=raw.numpy().tobytes())

    def _address(self, view: View) -> int:
        tensor = self._graph.buffers[view.buffer].tensor
        assert tensor is not None
        return tensor.untyped_storage().data_ptr()

    def _number(self, key: tuple[object, ...], make: Callable[[], StoredBuffer]) -> int:
        number = self._numbers.get(key)
        if number is None:
            buffer = make()
            number = self._numbers[key] = len(self._buffers)
            self._buffers.append(buffer)
        return number


def _page_key(page: torch.Tensor) -> tuple[object, ...]:
    return page.untyped_storage().data_ptr(), page.dtype, page.storage_offset(), tuple(page.shape), page.stride()


def _size(size: Size) -> SizeData:
    return size.constant if size.is_constant else size.factors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
