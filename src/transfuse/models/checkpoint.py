"""The tensors of a model's weight files, without Transformers."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from transfuse.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # as the format says
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Checkpoint(Protocol):
    """Tensors by name."""

    @property
    def num_elements(self) -> Mapping[str, int]:
        """Of each tensor."""

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` [n] with the numbers of a tensor from `start` on, cast to its dtype.

        Raises:
            WeightsError: the file ends before them, or cannot be read.
        """


@dataclass(frozen=True, slots=True)
class _Entry:
    file: int
    offset: int
    dtype: torch.dtype


class SafetensorsCheckpoint:
    """See `Checkpoint`.

    Args:
        folder: of safetensors files.

    Attributes:
        digest: of what the files say of their tensors, without the numbers.

    Raises:
        WeightsError: a header is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.num_elements: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._paths = weight_files(folder)
        self._files = [open(path, "rb", buffering=0) for path in self._paths]  # noqa: SIM115
        digest = hashlib.sha256()
        for number, path in enumerate(self._paths):
            header = self._header(number)
            digest.update(header)
            try:
                self._add(number, 8 + len(header), json.loads(header))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise WeightsError(f"{path} is damaged: its header is no list of tensors ({error}).") from error
        self.digest = digest.hexdigest()

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for file in self._files:
            file.close()

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See `Checkpoint.read`."""
        entry = self._entries[name]
        target = out if out.dtype is entry.dtype else torch.empty(len(out), dtype=entry.dtype)
        numbers = memoryview(target.view(torch.uint8).numpy().data)
        self._fill(entry.file, entry.offset + start * entry.dtype.itemsize, numbers)
        if target is not out:
            out.copy_(target)

    def _header(self, file: int) -> bytes:
        size = bytearray(8)
        self._fill(file, 0, memoryview(size))
        length = int.from_bytes(size, "little")
        if length > _MAX_HEADER_BYTES:
            raise WeightsError(f"{self._paths[file]} is damaged: its header has {length} bytes. Fetch it again.")
        header = bytearray(length)
        self._fill(file, 8, memoryview(header))
        return bytes(header)

    def _add(self, file: int, data: int, header: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        for name, facts in header.items():
            if name != "__metadata__" and (dtype := _DTYPES.get(str(facts["dtype"]))) is not None:
                self._entries[name] = _Entry(file, data + facts["data_offsets"][0], dtype)
                self.num_elements[name] = math.prod(facts["shape"])

    def _fill(self, file: int, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._files[file].fileno(), [target[done:]], offset + done)
            except OSError as error:
                raise WeightsError(f"{self._paths[file]} cannot be read: {error}.") from error
            if not count:
                raise WeightsError(f"{self._paths[file]} ends before what its header says. Fetch it again.")
            done += count


def weight_files(folder: Path) -> Sequence[Path]:
    """The safetensors files that hold the weights of a folder.

    Raises:
        WeightsError: the index is damaged, or names what is not there.
    """
    index = folder / _INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is damaged: it has no usable weight_map ({error}). Fetch it again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{index} names the file {name!r}; only .safetensors files beside it are read.")
        if not (folder / name).is_file():
            raise WeightsError(f"{index} names {name}, which is not in {folder}. Fetch the missing file.")
    return [folder / name for name in names]
