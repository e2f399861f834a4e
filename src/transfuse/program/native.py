"""Operations of a program that kernels of this package compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from transfuse.program.graph import View

FLOATS = (torch.float32, torch.bfloat16)

# As in csrc/activations.h and csrc/elementwise.h.
ACTIVATIONS = {
    "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5, "sigmoid": 6, "quick_gelu": 7, "tanh": 8,
}  # fmt: skip
ELEMENTWISE = {
    "copy": 0, "add": 1, "sub": 2, "mul": 3, "div": 4, "affine": 5, "tanh": 6, "sigmoid": 7, "silu": 8, "gelu": 9,
    "gelu_tanh": 10, "relu": 11, "exp": 12, "rsqrt": 13, "square": 14, "cos": 15, "sin": 16, "clamp": 17,
    "quick_gelu": 18, "neg": 19, "relu2": 20, "softplus": 21, "reciprocal": 22, "abs": 23, "pow": 24, "minimum": 25,
    "maximum": 26, "sqrt": 27, "log": 28, "divide_by": 29,
}  # fmt: skip


# Which integer says how the packed weight is encoded; the weight's numbers decide that, when it is packed.
ENCODING_INT = {"linear": 6, "gather_rows": 4}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in the layout of the packed product.

    Attributes:
        view: where its rows lie.
        glu: how gate and up lie in the rows of a gated linear unit; None for any other weight.
    """

    view: View
    glu: str | None = None


@dataclass(slots=True)
class NativeOp:
    """One op as csrc's kernels take it; what tensors, integers and numbers mean is said there.

    Attributes:
        kernel: its name.
        tensors: by index; None where an optional one is absent, and for the packed weight.
        written: indices of tensors that it writes.
        ints: integers by index.
        floats: numbers by index.
        weight: the packed weight, if any.
        weight_index: which tensor that is.
        name: of the operation that it came from, for profiles.
    """

    kernel: str
    tensors: list[View | None]
    written: tuple[int, ...]
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    weight: PackedWeight | None = None
    weight_index: int = -1
    name: str = ""

    def reads(self) -> Iterator[View]:
        """Views whose contents the op uses."""
        for index, view in enumerate(self.tensors):
            if view is not None and index not in self.written:
                yield view

    def writes(self) -> Iterator[View]:
        """Views that it changes."""
        for index in self.written:
            view = self.tensors[index]
            if view is not None:
                yield view


# Indices of tensors, as csrc/linear.cpp, norm.cpp and rotary.cpp have them.
class Linear:
    """Tensors of `linear`."""

    X, WEIGHT, BIAS, RESIDUAL, OUT, NORM_WEIGHT, NORM_BIAS, ADDEND, SUM_OUT, NORMED = range(10)


class Norm:
    """Tensors of `norm`."""

    X, WEIGHT, BIAS, ADDEND, OUT, SUM_OUT, GATE = range(7)


class Rotary:
    """Tensors of `rotary_cache`."""

    QUERY, KEY, VALUE, COS, SIN, QUERY_NORM, KEY_NORM, QUERY_OUT, KEY_OUT, KEY_CACHE, VALUE_CACHE, SLOTS = range(12)
