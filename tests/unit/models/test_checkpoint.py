"""Tensors are read from safetensors files as the library that wrote them reads them, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transfuse.errors import WeightsError
from transfuse.models.checkpoint import SafetensorsCheckpoint

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "number": torch.tensor(7, dtype=torch.int64),
}


def read(checkpoint: SafetensorsCheckpoint, name: str, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    out = torch.empty(checkpoint.num_elements[name] - start, dtype=dtype)
    checkpoint.read(name, start, out)
    return out


@pytest.mark.parametrize("name", TENSORS)
def test_whole_tensors(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.num_elements[name] == TENSORS[name].numel()
    assert torch.equal(read(checkpoint, name, TENSORS[name].dtype), TENSORS[name].view(-1))
    checkpoint.close()


def test_parts_and_other_dtypes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert read(checkpoint, "matrix", torch.float32, start=5).tolist() == [5, 6, 7, 8, 9, 10, 11]
    out = torch.empty(2, dtype=torch.bfloat16)
    checkpoint.read("matrix", 3, out)
    assert out.tolist() == [3, 4]
    assert read(checkpoint, "half", torch.float32).tolist() == [1.5, -2.25, 3.0]


def test_several_files(tmp_path: Path) -> None:
    names = {"matrix": "a.safetensors", "half": "b.safetensors"}
    for name, file in names.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "other.safetensors").write_bytes(b"not in the index")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.num_elements) == set(names)
    assert torch.equal(read(checkpoint, "half", torch.bfloat16), TENSORS["half"])


def test_the_digest_follows_what_the_header_says(tmp_path: Path) -> None:
    def digest(tensors: Mapping[str, torch.Tensor]) -> str:
        save_file(dict(tensors), tmp_path / "model.safetensors")
        return SafetensorsCheckpoint(tmp_path).digest

    same = digest(TENSORS)
    assert digest(TENSORS | {"matrix": TENSORS["matrix"] + 1}) == same
    assert digest(TENSORS | {"matrix": TENSORS["matrix"].T.contiguous()}) != same


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"short", "ends before"),
        ((1 << 40).to_bytes(8, "little"), "header has 1099511627776 bytes"),
        ((2).to_bytes(8, "little") + b"{]", "no list of tensors"),
        ((13).to_bytes(8, "little") + b'{"a": "text"}', "no list of tensors"),
        ((100).to_bytes(8, "little") + b"{}", "ends before"),
    ],
    ids=["no length", "length", "no JSON", "no tensors", "cut"],
)
def test_damaged_headers(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=reason):
        SafetensorsCheckpoint(tmp_path)


def test_a_file_that_was_cut_since(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 60)
    with pytest.raises(WeightsError, match=r"model\.safetensors ends before what its header says"):
        for name in TENSORS:
            read(checkpoint, name, TENSORS[name].dtype)
