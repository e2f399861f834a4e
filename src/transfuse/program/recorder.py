"""Records the tensor operations of one forward, with the memory that each reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from transfuse.program.errors import CaptureError


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a recording: which memory, and where in it.

    Attributes:
        storage: number of the memory in the recording.
        dtype: of its elements.
        offset: of the first element, in elements.
        sizes: of its dimensions.
        strides: in elements.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that computed something; tensors in its arguments and results are `TensorRef`s."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef, ...]


@dataclass(slots=True)
class Recording:
    """What one forward did.

    Attributes:
        calls: in order; views are not among them, since refs say where they lead.
        storages: a tensor that covers each memory, by its number.
        inputs: names of the memories that were handed in, by number.
        created: numbers of the memories that calls made.
        output: the result.
    """

    calls: list[Call] = field(default_factory=list)
    storages: list[torch.Tensor] = field(default_factory=list)
    inputs: dict[int, str] = field(default_factory=dict)
    created: set[int] = field(default_factory=set)
    output: TensorRef | None = None

    @property
    def result(self) -> torch.Tensor:
        """The output as a tensor."""
        ref = self.output
        assert ref is not None
        memory = self.storages[ref.storage].untyped_storage()
        return torch.empty(0, dtype=ref.dtype).set_(memory, ref.offset, ref.sizes, ref.strides)


def record(run: Callable[[], torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Recording:
    """Record what `run` computes.

    Args:
        run: computes with real tensors; it is run once, without gradients.
        inputs: the tensors that differ from step to step, by name.

    Raises:
        CaptureError: it looked into a tensor, so that the next run may take another way.
    """
    recorder = _Recorder()
    for name, tensor in inputs.items():
        recorder.recording.inputs[recorder.ref(tensor).storage] = name
    # Not inference mode, in which operations reach the recorder before they are taken apart.
    with torch.no_grad(), _NumbersStayInTensors(), recorder:
        output = run()
    recorder.recording.output = recorder.ref(output)
    return recorder.recording


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        # Memories whose numbers follow from sizes: looking at them is no worse than looking at those.
        self._from_sizes: set[int] = set()

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self.recording.storages)
            self._numbers[storage._cdata] = number
            # Held on to, so that no other memory can come to have the same address.
            self.recording.storages.append(tensor)
        offset = int(tensor.storage_offset())
        return TensorRef(number, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An operation's own implementation may look at its numbers.
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        outputs = [item for item in pytree.tree_leaves(result) if item is not None]
        if not all(isinstance(item, torch.Tensor) for item in outputs):
            if not self._follows_from_sizes(func, args, kwargs):
                raise CaptureError(f"the forward looks into a tensor ({func})")
            return result
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"the forward draws random numbers ({func})")
        if torch.Tag.dynamic_output_shape in func.tags and not _by_numbers(func, args):
            raise CaptureError(f"the shape of a tensor depends on the numbers in another ({func})")
        known = len(self.recording.storages)
        refs = tuple(self.ref(item) for item in outputs)
        # Arguments that are seen for the first time were there before, and get their numbers after these.
        made = {ref.storage for ref in refs if ref.storage >= known}
        named_args, named_kwargs = pytree.tree_map_only(torch.Tensor, self.ref, (args, kwargs))
        given = {ref.storage for ref in pytree.tree_leaves((named_args, named_kwargs)) if isinstance(ref, TensorRef)}
        made -= given
        self.recording.created |= made
        if self._follows_from_sizes(func, args, kwargs):
            self._from_sizes |= made
        elif func._schema.is_mutable:
            self._from_sizes -= given
        if func._schema.is_mutable or made:
            self.recording.calls.append(Call(func, named_args, named_kwargs, refs))
        return result

    def _follows_from_sizes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what an operation gives is known once sizes are, as a mask is that says that all is seen."""
        if func in _READING_SIZES:
            return True
        if func in _READING_NOTHING:
            return False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return all(self.ref(tensor).storage in self._from_sizes for tensor in tensors)


class _NumbersStayInTensors(TorchFunctionMode):
    """Refuses what hands numbers to Python without an operation that a recorder would see."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise CaptureError(f"the forward looks into a tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


# They read no number of their tensor.
_READING_SIZES = frozenset(
    {
        torch.ops.aten.ones_like.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.full_like.default,
        torch.ops.aten.new_ones.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_full.default,
    }
)


# What it gives is arbitrary until it is written.
_READING_NOTHING = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default})


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether rows are chosen by their numbers, rather than by a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
