"""Reads a GGUF file's header into metadata and a tensor table, trusting no number in it."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from transfuse.errors import WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED_HEADER_BYTES = 24
_DEFAULT_ALIGNMENT = 32

# Far above what real files hold, and low enough that a hostile header costs little time and memory.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ARRAY_LENGTH = 1 << 22
_MAX_STRING_BYTES = 1 << 24
_MAX_HEADER_BYTES = 1 << 26
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
# Views of 2- and 4-byte floats on the mapped file need this much.
_MIN_ALIGNMENT = 8

_STRING, _ARRAY = 8, 9
_SCALAR_FORMAT = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# The file names one end token; chat models end their turn with one of these as well.
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
_CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file and how it is stored.

    Attributes:
        name: GGUF name.
        shape: in torch's order, slowest dimension first.
        type_id: ggml type.
        offset: in bytes from the start of the file.
        num_bytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header: every tensor lies within the file.

    Attributes:
        path: the file.
        metadata: key to value; arrays are lists.
        tensors: name to place.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Llama.cpp's name of the model family."""
        return str(self.metadata["general.architecture"])


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header of a GGUF file; tensor data is not touched.

    Raises:
        WeightsError: the file is no GGUF file, truncated, or holds counts, sizes or offsets that cannot be true.
    """
    try:
        size = path.stat().st_size
        if size < _FIXED_HEADER_BYTES:
            raise WeightsError(f"{path} is {size} bytes long: too short for a GGUF file. Fetch it again.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            return _HeaderReader(path, blob, size).read()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}.") from error


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids that end a generation: the file's end tokens and the end-of-turn tokens of its vocabulary."""
    metadata = file.metadata
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ids += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL_TOKEN and token in _END_OF_TURN_TOKENS
    ]
    return list(dict.fromkeys(ids))


class _HeaderReader:
    """Walks the header; every read is checked against the end of the header it may have."""

    def __init__(self, path: Path, blob: mmap.mmap, size: int) -> None:
        self.path = path
        self.blob = blob
        self.size = size
        self.limit = min(size, _MAX_HEADER_BYTES)
        self.position = 0

    def read(self) -> GgufFile:
        if self.take(4) != _MAGIC:
            raise self.damage("it does not start with the bytes GGUF")
        version, num_tensors, num_keys = self.unpack("IQQ")
        if version not in _VERSIONS:
            raise self.damage(f"version {version} is not one of {_VERSIONS} (little-endian)")
        self.check_count("metadata keys", num_keys, _MAX_KEYS)
        self.check_count("tensors", num_tensors, _MAX_TENSORS)
        metadata = self.read_metadata(num_keys)
        if not isinstance(metadata.get("general.architecture"), str):
            raise self.damage("the metadata key general.architecture is missing or no string")
        return GgufFile(self.path, metadata, self.read_tensors(num_tensors, self.alignment(metadata)))

    def read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.read_string()
            if key in metadata:
                raise self.damage(f"the metadata key {key[:80]!r} occurs twice")
            metadata[key] = self.read_value(self.unpack("I")[0])
        return metadata

    def read_value(self, value_type: int) -> Any:
        if value_type in _SCALAR_FORMAT:
            return self.unpack(_SCALAR_FORMAT[value_type])[0]
        if value_type == _STRING:
            return self.read_string()
        if value_type != _ARRAY:
            raise self.damage(f"a metadata value has the unknown type {value_type}")
        element_type, count = self.unpack("IQ")
        self.check_count("array elements", count, _MAX_ARRAY_LENGTH)
        if element_type == _STRING:
            return [self.read_string() for _ in range(count)]
        if element_type not in _SCALAR_FORMAT:
            raise self.damage(f"a metadata array has elements of type {element_type}, which is unknown or nested")
        return list(self.unpack(f"{count}{_SCALAR_FORMAT[element_type]}"))

    def read_tensors(self, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
        entries = [self.read_entry() for _ in range(num_tensors)]
        data_start = (self.position + alignment - 1) // alignment * alignment
        tensors: dict[str, GgufTensor] = {}
        total = 0
        for name, shape, type_id, offset in entries:
            num_bytes = self.stored_bytes(name, shape, type_id)
            total += num_bytes
            start = data_start + offset
            if offset % alignment or start + num_bytes > self.size or total > self.size:
                raise self.damage(
                    f"tensor {name[:80]!r} would lie at bytes {start} to {start + num_bytes} of a file of "
                    f"{self.size} bytes (alignment {alignment}): truncated or damaged"
                )
            if name in tensors:
                raise self.damage(f"the tensor {name[:80]!r} occurs twice")
            tensors[name] = GgufTensor(name, shape, type_id, start, num_bytes)
        return tensors

    def read_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.read_string()
        (num_dimensions,) = self.unpack("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.damage(f"tensor {name[:80]!r} has {num_dimensions} dimensions; expected 1 to {_MAX_DIMENSIONS}")
        # ggml names the fastest dimension first, torch the slowest.
        shape = tuple(reversed(self.unpack(f"{num_dimensions}Q")))
        type_id, offset = self.unpack("IQ")
        return name, shape, type_id, offset

    def stored_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if type_id not in {int(known) for known in GGML_QUANT_SIZES}:
            raise self.damage(f"tensor {name[:80]!r} has the unknown ggml type {type_id}")
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        if 0 in shape or shape[-1] % block_elements:
            raise self.damage(f"tensor {name[:80]!r} of shape {shape} does not divide into blocks of {block_elements}")
        return prod(shape) // int(block_elements) * int(block_bytes)

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT or alignment % 8:
            raise self.damage(f"general.alignment is {alignment!r}; expected a multiple of 8 up to {_MAX_ALIGNMENT}")
        return alignment

    def read_string(self) -> str:
        (length,) = self.unpack("Q")
        if length > _MAX_STRING_BYTES:
            raise self.damage(f"a string claims {length} bytes; at most {_MAX_STRING_BYTES} are accepted")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damage(f"a string is not UTF-8: {error}") from error

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.limit:
            raise self.damage(
                f"the header needs byte {end}, and ends at {self.limit} (file {self.size} bytes, headers at most "
                f"{_MAX_HEADER_BYTES})"
            )
        data = self.blob[self.position : end]
        self.position = end
        return data

    def check_count(self, what: str, count: int, limit: int) -> None:
        # A key, an element or a tensor takes a byte at least, so the rest of the file bounds their number too.
        if count > min(limit, self.size - self.position):
            raise self.damage(f"it claims {count} {what}; at most {limit} are accepted, and they must fit in the file")

    def damage(self, reason: str) -> WeightsError:
        return WeightsError(f"{self.path} is not a valid GGUF file: {reason} (near byte {self.position}).")
