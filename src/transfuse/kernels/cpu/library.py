"""The compiled kernels as Python calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # its OpenMP library is loaded first, so that there is one pool of threads

from transfuse.errors import KernelError
from transfuse.kernels.cpu.targets import TARGETS, tiles_refused

MAX_DIMS, MAX_TENSORS, MAX_INTS, MAX_FLOATS = 4, 14, 12, 6
NUM_SYMBOLS = 5

# As in csrc/op.h and csrc/executor.cpp; `Library` compares the sizes.
VIEW = np.dtype(
    [
        ("buffer", "i4"),
        ("dtype", "i4"),
        ("dims", "i4"),
        ("offset", "i4"),
        ("size", "i4", MAX_DIMS),
        ("stride", "i4", MAX_DIMS),
    ]
)
OP = np.dtype(
    [
        ("kind", "i4"),
        ("num_tensors", "i4"),
        ("view", VIEW, MAX_TENSORS),
        ("ints", "i8", MAX_INTS),
        ("floats", "f8", MAX_FLOATS),
    ],
    align=True,
)
# Packed weights are bytes to whoever describes them; what they hold is among the settings of the op that reads them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.int32: 3, torch.bool: 4, torch.uint8: 4}


class Library:
    """A build of the kernels.

    Args:
        path: of the shared library.

    Attributes:
        target: what it was compiled for.
        compiler: what compiled it.

    Raises:
        OSError: it cannot be loaded.
        KernelError: it was made from other sources than this package's, or the system refuses what it needs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        pointer, i64, i32, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p
        self._kernel = self.function("kernel", i32, text)
        self._executions = self.function("executions", i64, i32)
        self._lost_cores = self.function("lost_cores", i64)
        self._program_create = self.function("program_create", pointer, pointer, i64, pointer, i64, i64)
        self._program_destroy = self.function("program_destroy", None, pointer)
        self._program_run = self.function(
            "program_run", i32, pointer, i64, i64, pointer, pointer, i32, pointer, pointer
        )
        if (found := self.function("descriptor_bytes", i64)()) != OP.itemsize:
            raise KernelError(f"{path} describes an op in {found} bytes, and this package in {OP.itemsize}")
        self.target: str = self.function("target", text)().decode()
        if TARGETS[self.target].tiles and (reason := tiles_refused()) is not None:
            raise KernelError(f"{path} cannot run: {reason}")
        self.compiler: str = self.function("compiler", text)().decode()

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the library, given what it returns and takes as types of `ctypes`."""
        function = self._lib[f"transfuse_{name}"]
        function.restype, function.argtypes = result, arguments
        return function

    def kernel(self, name: str) -> int:
        """Number of a kernel in `OP["kind"]`; -1 where this build has none of that name."""
        return int(self._kernel(name.encode()))

    def executions(self, name: str) -> int:
        """How often a kernel has run since the library was loaded.

        Raises:
            ValueError: this build has none of that name.
        """
        if (kind := self.kernel(name)) < 0:
            raise ValueError(f"{self.path} has no kernel {name}")
        return int(self._executions(kind))

    @property
    def num_lost_cores(self) -> int:
        """How often a thread has lost its core to another process for long, since the library was loaded."""
        return int(self._lost_cores())


class NativeProgram:
    """Op descriptors that the library holds, ready to run.

    Args:
        library: the kernels.
        ops: array of `OP`; sizes, strides and offsets are indices into `expressions`, in elements.
        expressions: i64 [n, NUM_SYMBOLS]; times the symbols (1, T tokens, S logit rows, R requests, B blocks per row of
            the block table) they give a number.
        num_buffers: how many base addresses `run` is given.
    """

    def __init__(self, library: Library, ops: np.ndarray, expressions: np.ndarray, num_buffers: int) -> None:
        assert ops.dtype == OP and expressions.dtype == np.int64 and expressions.shape[1] == NUM_SYMBOLS
        self._library = library
        self._num_buffers = num_buffers
        self.num_ops = len(ops)
        ops, expressions = np.ascontiguousarray(ops), np.ascontiguousarray(expressions)
        self._handle = library._program_create(
            ops.ctypes.data, len(ops), expressions.ctypes.data, len(expressions), num_buffers
        )
        if self._handle is None:
            raise MemoryError("no memory for the program")

    def run(
        self,
        first: int,
        last: int,
        symbols: np.ndarray,
        buffers: np.ndarray,
        num_threads: int,
        progress: int | None = None,
        times: np.ndarray | None = None,
    ) -> int:
        """Run ops `first` to `last` (exclusive).

        Args:
            first: index of the first op.
            last: one past the last.
            symbols: i64 [NUM_SYMBOLS], the first of them 1.
            buffers: u64 [num_buffers], addresses.
            num_threads: that compute.
            progress: address of a u64 that is counted up after each op.
            times: i64 [last - first + 1], gets the start of each op and the end of the last, in nanoseconds.

        Returns:
            0, or what an op says went wrong.
        """
        assert len(buffers) == self._num_buffers
        times_address = None if times is None else times.ctypes.data
        return int(
            self._library._program_run(
                self._handle,
                first,
                last,
                symbols.ctypes.data,
                buffers.ctypes.data,
                num_threads,
                progress,
                times_address,
            )
        )

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._library._program_destroy(handle)


def run_op(
    library: Library,
    kernel: str,
    tensors: Sequence[torch.Tensor | None],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    num_threads: int = 1,
) -> None:
    """Run one op on tensors as they are.

    Raises:
        ValueError: the library has no such kernel, or a tensor has too many dimensions.
        RuntimeError: the op says that something went wrong.
    """
    kind = library.kernel(kernel)
    if kind < 0:
        raise ValueError(f"{library.path} has no kernel {kernel}")
    op = np.zeros(1, OP)
    values: list[int] = []

    def index(value: int) -> int:
        values.append(value)
        return len(values) - 1

    op["kind"], op["num_tensors"] = kind, len(tensors)
    op["ints"][0, : len(ints)], op["floats"][0, : len(floats)] = ints, floats
    view = op["view"][0]
    view["buffer"] = -1
    buffers = np.zeros(len(tensors), np.uint64)
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.dim() > MAX_DIMS:
            raise ValueError(f"tensor {i} has {tensor.dim()} dimensions; at most {MAX_DIMS}")
        buffers[i] = tensor.data_ptr()
        view[i]["buffer"], view[i]["dtype"], view[i]["dims"] = i, DTYPES[tensor.dtype], tensor.dim()
        view[i]["offset"] = index(0)
        for d in range(tensor.dim()):
            view[i]["size"][d], view[i]["stride"][d] = index(tensor.shape[d]), index(tensor.stride(d))
    expressions = np.zeros((len(values), NUM_SYMBOLS), np.int64)
    expressions[:, 0] = values
    program = NativeProgram(library, op, expressions, len(tensors))
    code = program.run(0, 1, np.array([1, 0, 0, 0, 0], np.int64), buffers, num_threads)
    if code != 0:
        raise RuntimeError(f"{kernel} failed with code {code}")
