"""Tensors of a GGUF file are those that the model is loaded with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.models.gguf_files import F32, Q4_1, Q8_0, tiny_model, write_gguf
from transfuse.models.gguf_checkpoint import GgufCheckpoint
from transfuse.models.loader import load_model
from transfuse.models.resolve import ModelSource


@pytest.mark.parametrize("kind", [F32, Q4_1, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_tensors(tmp_path: Path, family: str, kind: object, dtype: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", family, tiny_model(family), kind)
    loaded = load_model(ModelSource("gguf", path, "m"), dtype=dtype, show_progress=False)
    checkpoint = GgufCheckpoint(path)
    threads = torch.get_num_threads()
    for name, parameter in loaded.module.named_parameters():
        out = torch.empty(checkpoint.num_elements[name], dtype=parameter.dtype)
        checkpoint.read(name, 0, out)
        assert torch.equal(out, parameter.reshape(-1))
        part = torch.empty(3, dtype=parameter.dtype)
        checkpoint.read(name, 5, part)
        assert torch.equal(part, out[5:8])
    assert torch.get_num_threads() == threads
