from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.gguf_files import Q8_0, tiny_model, write_gguf
from transfuse.errors import TransfuseError, WeightsError
from transfuse.models.gguf_reader import GgufFile, read_gguf
from transfuse.models.loader import load_model
from transfuse.models.resolve import ModelSource


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = string("general.architecture") + struct.pack("<I", 8) + string("llama")


def header(keys: bytes = ARCHITECTURE, num_keys: int = 1, num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys


def tensor(name: str = "t", dims: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def scalar(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


HOSTILE = {
    "empty": b"",
    "magic": b"GGML" + header()[4:],
    "big-endian version": header(version=3 << 24),
    "2^63 keys": header(num_keys=1 << 63),
    "2^62 tensors": header(num_tensors=1 << 62) + bytes(64),
    "2^60 byte string": header(struct.pack("<Q", 1 << 60)),
    "string beyond the end": header(struct.pack("<Q", 100) + b"abc"),
    "not UTF-8": header(struct.pack("<Q", 2) + b"\xff\xfe"),
    "unknown value type": header(string("k") + struct.pack("<I", 99)),
    "2^61 element array": header(string("k") + struct.pack("<IIQ", 9, 12, 1 << 61)),
    "nested array": header(string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(32)),
    "no architecture": header(b"", 0),
    "architecture is a number": header(scalar("general.architecture", 3)),
    "repeated key": header(ARCHITECTURE * 2, 2),
    "five dimensions": header(num_tensors=1) + tensor(dims=(1,) * 5) + bytes(200),
    "no dimension": header(num_tensors=1) + tensor(dims=()) + bytes(200),
    "zero dimension": header(num_tensors=1) + tensor(dims=(0, 4)) + bytes(200),
    "overflowing dimensions": header(num_tensors=1) + tensor(dims=(1 << 62, 1 << 62, 1 << 62)) + bytes(200),
    "unknown ggml type": header(num_tensors=1) + tensor(type_id=777) + bytes(200),
    "row not of whole blocks": header(num_tensors=1) + tensor(dims=(33,), type_id=8) + bytes(200),
    "offset beyond the end": header(num_tensors=1) + tensor(offset=1 << 40) + bytes(200),
    "offset wraps 64 bits": header(num_tensors=1) + tensor(offset=(1 << 64) - 32) + bytes(200),
    "misaligned offset": header(num_tensors=1) + tensor(dims=(1,), offset=4) + bytes(200),
    "data cut off": header(num_tensors=1) + tensor(dims=(1 << 10,)) + bytes(200),
    "repeated tensor": header(num_tensors=2) + tensor(dims=(1,)) * 2 + bytes(200),
    "more tensor bytes than the file": header(num_tensors=50)
    + b"".join(tensor(name=str(i), dims=(64,)) for i in range(50))
    + bytes(300),
    "alignment zero": header(ARCHITECTURE + scalar("general.alignment", 0), 2),
    "alignment one": header(ARCHITECTURE + scalar("general.alignment", 1), 2),
    "alignment 2^31": header(ARCHITECTURE + scalar("general.alignment", 1 << 31), 2),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_in_little_memory(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=r"m\.gguf"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_right_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        header(ARCHITECTURE + scalar("general.alignment", 64), 2, num_tensors=1) + tensor(dims=(8, 2)) + bytes(256)
    )
    file = read_gguf(path)

    assert file.metadata == {"general.architecture": "llama", "general.alignment": 64}
    found = file.tensors["t"]
    assert (found.shape, found.num_bytes) == ((2, 8), 64)
    assert found.offset % 64 == 0 and found.offset + found.num_bytes <= path.stat().st_size


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, "llama", tiny_model("llama"), Q8_0).read_bytes()


def outcome(path: Path, content: bytes, whole_load: bool) -> str:
    """What loading the content gives; anything but a typed error fails the test by itself."""
    path.write_bytes(content)
    try:
        if whole_load:
            load_model(ModelSource("gguf", path, "m"), show_progress=False)
        else:
            read_gguf(path)
    except TransfuseError as error:
        return type(error).__name__
    return "loaded"


def test_truncated_files_give_typed_errors(written: bytes, tmp_path: Path) -> None:
    lengths = [*range(0, 2000, 37), *range(2000, len(written), len(written) // 40), len(written) - 33]
    assert {outcome(tmp_path / "m.gguf", written[:length], False) for length in lengths} == {"WeightsError"}


def test_mutated_headers_give_typed_errors_or_load(written: bytes, tmp_path: Path) -> None:
    generator = random.Random(5)
    start_of_data = min(t.offset for t in read_gguf_bytes(written, tmp_path).tensors.values())
    outcomes = []
    for round_number in range(700):
        content = bytearray(written)
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(start_of_data)] = generator.choice([0, 1, 0x7F, 0xFF, generator.randrange(256)])
        outcomes.append(outcome(tmp_path / "m.gguf", bytes(content), whole_load=round_number % 10 == 0))

    assert set(outcomes) <= {"loaded", "WeightsError", "UnsupportedModelError"}
    assert outcomes.count("WeightsError") > 100


def read_gguf_bytes(content: bytes, folder: Path) -> GgufFile:
    path = folder / "whole.gguf"
    path.write_bytes(content)
    return read_gguf(path)
