from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.pooling_models import add_pooling, write_json
from transfuse.errors import ModelError, UnsupportedModelError, WeightsError
from transfuse.models.pooling_files import (
    Dense,
    classifier_activation,
    find_task,
    matryoshka_dims,
    read_pooling_rule,
)
from transfuse.models.resolve import ModelSource


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "embed"),
        ("XLMRobertaModel", "embed"),
        ("BertForMaskedLM", "embed"),
        ("T5EncoderModel", "embed"),
        ("Qwen3ForCausalLM", "generate"),
        ("GPT2LMHeadModel", "generate"),
        ("Gemma3ForConditionalGeneration", "generate"),
        ("RobertaForSequenceClassification", "score"),
        ("SomebodysDecoder", "generate"),
        (None, "generate"),
    ],
)
def test_the_architecture_says_what_a_model_does(architecture: str | None, task: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": [architecture]} if architecture else {})
    assert find_task(_source(tmp_path), "auto") == task
    assert find_task(_source(tmp_path), "generate") == "generate"
    assert find_task(_source(tmp_path), "pooling") == ("embed" if task == "generate" else task)


def test_files_for_pooling_make_a_generating_model_embed(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    assert find_task(_source(add_pooling(tmp_path, "lasttoken")), "auto") == "embed"


def test_gguf_only_generates(tmp_path: Path) -> None:
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    assert find_task(source, "auto") == "generate"
    with pytest.raises(UnsupportedModelError, match="can only generate"):
        find_task(source, "pooling")


def test_without_files_the_default_is_named(tmp_path: Path) -> None:
    rule = read_pooling_rule(tmp_path)
    assert (rule.modes, rule.normalises, rule.max_len) == ((), True, None)
    assert "default" in rule.origin


def test_all_files_are_read(tmp_path: Path) -> None:
    about = {"prompts": {"query": "q: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    add_pooling(tmp_path, "cls_token", "mean_tokens", normalises=False, about=about, include_prompt=False)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": True})
    rule = read_pooling_rule(tmp_path)
    assert rule.modes == ("cls", "mean")
    assert (rule.normalises, rule.includes_prompt, rule.lowers_case, rule.max_len) == (False, False, True, 77)
    assert (rule.prompts, rule.default_prompt, rule.similarity) == ({"query": "q: "}, "query", "dot")
    assert rule.origin == "modules.json"


@pytest.mark.parametrize(
    ("written", "modes"), [("lasttoken", ("lasttoken",)), ("mean+max", ("mean", "max")), (["cls"], ("cls",))]
)
def test_newer_files_name_modes(written: Any, modes: tuple[str, ...], tmp_path: Path) -> None:
    add_pooling(tmp_path, "mean_tokens")
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": written})
    assert read_pooling_rule(tmp_path).modes == modes


def test_dense_layers(tmp_path: Path) -> None:
    _steps(tmp_path, "Transformer", "Pooling", "Dense", "Normalize")
    folder = tmp_path / "Dense"
    write_json(folder / "config.json", {"activation_function": "torch.nn.modules.activation.GELU"})
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        read_pooling_rule(tmp_path)
    save_file({"linear.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    assert read_pooling_rule(tmp_path).layers == (Dense(folder / "model.safetensors", "GELU"),)
    write_json(folder / "config.json", {"activation_function": "os.system"})
    with pytest.raises(UnsupportedModelError, match=r"os\.system"):
        read_pooling_rule(tmp_path)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("Transformer", "Pooling", "WeightedLayerPooling"), "a step WeightedLayerPooling"),
        (("Transformer", "Pooling", "Normalize", "Pooling"), "Pooling after Normalize"),
    ],
)
def test_steps_that_are_not_implemented(steps: tuple[str, ...], message: str, tmp_path: Path) -> None:
    _steps(tmp_path, *steps)
    with pytest.raises(UnsupportedModelError, match=message):
        read_pooling_rule(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("modules.json", "{", ModelError),
        ("modules.json", "{}", ModelError),
        ("modules.json", '[{"type": "x.Pooling", "path": "../.."}]', ModelError),
        ("1_Pooling/config.json", "[]", ModelError),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', UnsupportedModelError),
        ("1_Pooling/config.json", "{}", UnsupportedModelError),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', ModelError),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', ModelError),
    ],
)
def test_damaged_files_are_named(file: str, text: str, error: type[Exception], tmp_path: Path) -> None:
    (add_pooling(tmp_path, "mean_tokens") / file).write_text(text)
    with pytest.raises(error, match=file):
        read_pooling_rule(tmp_path)


def test_lengths_that_vectors_may_be_cut_to() -> None:
    assert matryoshka_dims({}) is None
    assert matryoshka_dims({"is_matryoshka": True}) == ()
    assert matryoshka_dims({"is_matryoshka": True, "matryoshka_dimensions": [64, 8]}) == (8, 64)


def test_what_makes_a_score_of_a_logit() -> None:
    assert classifier_activation({}) == "Sigmoid"
    older = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    newer = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    assert (classifier_activation(older), classifier_activation(older | newer)) == ("Identity", "Tanh")
    with pytest.raises(UnsupportedModelError, match=r"my\.Activation"):
        classifier_activation({"sentence_transformers": {"activation_fn": "my.Activation"}})


def _source(folder: Path) -> ModelSource:
    return ModelSource("folder", folder, "m")


def _steps(folder: Path, *names: str) -> None:
    write_json(folder / "modules.json", [{"type": f"sentence_transformers.models.{n}", "path": n} for n in names])
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    write_json(folder / "Pooling" / "config.json", {"pooling_mode": "mean"})
