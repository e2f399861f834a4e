"""Fused forwards as a Python file that anyone can read and import."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.zoo import build
from transfuse import fuse, unfuse
from transfuse.fusion.fused_class import original_class
from transfuse.kernels.torch_ops import executions
from transfuse.rewrite.export import as_module

OPS = ("transfuse.kernels.fused_ops", "transfuse.kernels.rotary_ops")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "olmo"])
def test_it_computes_what_the_fused_model_does(name: str, tmp_path: Path) -> None:
    model, ids = build(name), torch.arange(5, 14).unsqueeze(0)
    fuse(model)
    taken_on = {
        path: type(part) for path, part in model.named_modules() if original_class(type(part)) is not type(part)
    }
    with torch.no_grad():
        executions.clear()
        expected, counted = model(ids, use_cache=False).logits, executions.copy()

    # One file for each module of Transformers whose classes were fused, since names mean different things in them.
    unfuse(model)
    for home in sorted({cls.__module__ for cls in taken_on.values()}):
        classes = list(dict.fromkeys(cls for cls in taken_on.values() if cls.__module__ == home))
        path = tmp_path / f"fused_{home.rpartition('.')[2]}.py"
        path.write_text(as_module(classes, f"Fused forwards of {home}.", OPS))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        written = [value for key, value in vars(module).items() if key.startswith("Fused")]
        assert len(written) == len(classes)
        again = dict(zip(classes, written, strict=True))
        for part_path, cls in taken_on.items():
            if cls in again:
                model.get_submodule(part_path).__class__ = again[cls]

    with torch.no_grad():
        executions.clear()
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert executions == counted
