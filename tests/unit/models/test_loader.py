from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from tests.unit.models.gguf_files import tiny_model
from transfuse.errors import RemoteCodeError, UnsupportedModelError, WeightsError
from transfuse.models.loader import LoadedModel, load_config, load_model
from transfuse.models.resolve import ModelSource


def source(folder: Path) -> ModelSource:
    return ModelSource("folder", folder, folder.name)


def load(folder: Path, dtype: str = "auto", **options: object) -> LoadedModel:
    return load_model(source(folder), dtype=dtype, show_progress=False, **options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 30)[None], use_cache=False).logits


def saved(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("shard_size", ["5GB", "50KB"])
def test_logits_equal_those_of_the_saved_model(shard_size: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    loaded = load(saved(model, tmp_path / "m", max_shard_size=shard_size))

    assert isinstance(loaded.module, LlamaForCausalLM)
    assert torch.equal(logits(loaded.module), logits(model))
    assert loaded.num_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert not loaded.module.training and not any(p.requires_grad for p in loaded.module.parameters())
    assert loaded.generation_config.eos_token_id == 2 and loaded.load_seconds > 0


def test_tied_weights_are_tied_and_counted_once(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    loaded = load(saved(model, tmp_path / "m"))

    assert isinstance(loaded.module, Gemma3ForCausalLM)
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert loaded.num_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())


def test_experts_saved_one_by_one_are_merged(tmp_path: Path) -> None:
    config = MixtralConfig(**{**tiny_model("llama").config.to_dict(), "num_local_experts": 4, "model_type": "mixtral"})
    model = MixtralForCausalLM(config).eval()
    folder = saved(model, tmp_path / "m")

    assert any(".experts.3." in name for name in load_file(folder / "model.safetensors"))
    assert torch.equal(logits(load(folder).module), logits(model))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)],
)
def test_dtype(asked: Any, expected: Any, tmp_path: Path) -> None:
    folder = saved(tiny_model("qwen3").to(torch.bfloat16), tmp_path / "m")

    assert {parameter.dtype for parameter in load(folder, asked).module.parameters()} == {expected}


def test_attention_implementation_is_passed_on(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")

    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.strange"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(32)

    rewrite(folder / "model.safetensors", change)
    with pytest.raises(WeightsError, match=r"1 missing .*1 unexpected .*1 misshapen") as caught:
        load(folder)

    assert caught.value.missing == ("model.layers.0.mlp.up_proj.weight",)
    assert caught.value.unexpected == ("model.strange",)
    assert caught.value.misshapen == ("model.norm.weight: checkpoint (32,) -> model (64,)",)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(WeightsError, match=r"27 missing \(.*, \.\.\.\)") as caught:
        load(folder)

    assert len(caught.value.missing) == 27
    assert str(caught.value).count("model.layers.") == 20


def test_what_the_class_ignores_is_no_error(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    rewrite(
        folder / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )

    assert load(folder).module is not None


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_damaged_safetensors_are_named(damage: Any, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m", max_shard_size="50KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    content = victim.read_bytes()
    victim.write_bytes({"truncated": content[:-100], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(WeightsError, match=f"{victim.name} is damaged"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../elsewhere.safetensors", "only .safetensors files beside it"),
        ("weights.bin", "only .safetensors files"),
        ("model-9.safetensors", "not in"),
        (3, "names the file 3"),
    ],
)
def test_shard_index_may_name_only_files_beside_it(name: Any, match: str, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match=match):
        load(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_broken_shard_index(content: Any, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="no usable weight_map"):
        load(folder)


@pytest.mark.parametrize("entries", [{"model_type": "no_such_type"}, {"hidden_size": "wide"}, {"hidden_size": 63}])
def test_unusable_config(entries: Any, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    edit_config(folder, **entries)
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        load_config(source(folder), trust_remote_code=False)


def test_model_that_is_no_causal_language_model(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        load(folder)


CUSTOM_CODE = """
import pathlib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({canary!r}).touch()


class TinyConfig(LlamaConfig):
    model_type = "tiny_custom"


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out
"""


def test_custom_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    canary = tmp_path / "canary"
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "custom")
    (folder / "modeling_tiny.py").write_text(CUSTOM_CODE.format(canary=str(canary)))
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    edit_config(folder, model_type="tiny_custom", architectures=["TinyForCausalLM"], auto_map=auto_map)

    with pytest.raises(RemoteCodeError, match="auto_map"):
        load(folder)
    assert not canary.exists()

    loaded = load(folder, trust_remote_code=True)
    assert type(loaded.module).__name__ == "TinyForCausalLM"
    assert torch.equal(logits(loaded.module), logits(model) * 2)
