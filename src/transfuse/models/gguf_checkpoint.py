"""The tensors of a GGUF file under Transformers' names, without Transformers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from transfuse.models.gguf import ROPE_FACTORS, LazyTensor, map_bytes, parameter_name, transform
from transfuse.models.gguf_reader import GgufFile, GgufTensor, read_gguf


@dataclass(frozen=True, slots=True)
class _Heads:
    num_attention_heads: int
    num_key_value_heads: int


class GgufCheckpoint:
    """See `Checkpoint`; a tensor that is read is dequantised.

    Args:
        path: of the file.

    Attributes:
        digest: of what the file says of its tensors, without the numbers.

    Raises:
        WeightsError: its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self._family = file.architecture
        self._heads = _heads(file)
        self._tensors: dict[str, GgufTensor] = {
            parameter_name(self._family, name): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS
        }
        self._blob: torch.Tensor | None = map_bytes(file)
        self.num_elements = {name: math.prod(tensor.shape) for name, tensor in self._tensors.items()}
        header = min((tensor.offset for tensor in file.tensors.values()), default=0)
        self.digest = hashlib.sha256(self._blob[:header].numpy().data).hexdigest()

    def close(self) -> None:
        """Let go of the file; nothing can be read afterwards."""
        self._blob = None

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See `Checkpoint.read`."""
        assert self._blob is not None, "the file is closed"
        tensor = self._tensors[name]
        lazy = LazyTensor(self._blob, tensor, out.dtype, transform(self._family, tensor.name, self._heads))
        with _one_thread():
            out.copy_(lazy[:].reshape(-1)[start : start + len(out)])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch computes on this thread.

    Threads that wait for each other at every one of many small operations took ten times as long beside a busy process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _heads(file: GgufFile) -> _Heads:
    num_heads = file.metadata.get(f"{file.architecture}.attention.head_count", 1)
    return _Heads(num_heads, file.metadata.get(f"{file.architecture}.attention.head_count_kv", num_heads))
