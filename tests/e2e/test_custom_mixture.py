"""A model with modelling code of its own, whose experts are modules of a list, from its files to its tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.greedy import SCENARIOS, check, generated
from tests.zoo import VOCAB_SIZE
from transfuse import LLM, SamplingParams
from transfuse.config import engine_config
from transfuse.kernels.torch_ops import executions
from transfuse.models.resolve import resolve_model
from transfuse.verify.run import Extent, verify

SETTINGS = {"dtype": "float32", "trust_remote_code": True, "show_progress": False}
HERE = Path(__file__).parent
NUM_TOKENS = 16
PROMPTS = [
    torch.randint(3, VOCAB_SIZE - 16, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, 2, 7, 33, 80)
]


@pytest.fixture
def folder(tmp_path: Path, zoo_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of two layers, each with another loop over its experts."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "mixture"
    shutil.copytree(zoo_folder("llama"), path)
    shutil.copy(HERE / "planted" / "modeling_mixture.py", path)
    config = json.loads((path / "config.json").read_text())
    names = {"AutoConfig": "MixtureConfig", "AutoModelForCausalLM": "MixtureForCausalLM"}
    config |= {
        "model_type": "mixture",
        "architectures": ["MixtureForCausalLM"],
        "auto_map": {auto: f"modeling_mixture.{name}" for auto, name in names.items()},
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    loaded = AutoConfig.from_pretrained(path, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(path / "saved")
    shutil.copy(path / "saved" / "model.safetensors", path / "model.safetensors")
    return path


def test_tokens_are_those_of_generate(folder: Path, verdicts: Path) -> None:
    expected = generated(folder, PROMPTS, NUM_TOKENS, trust_remote_code=True)
    for scenario in SCENARIOS[:4]:
        check(folder, scenario, PROMPTS, expected, trust_remote_code=True, cache_dir=verdicts)


def test_experts_are_fused_and_run(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, **SETTINGS, cache_dir=tmp_path / "cache", num_kv_blocks=64) as llm:
        assert llm.model_impl == "fused", llm.model_impl_reason
        runner = llm._built.core.engine._runner
        before = executions.copy()
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        with runner.by_modules():
            llm.generate([{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False)
        ran, plan = executions - before, llm._built.plan
    assert plan is not None
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert ran["experts"] == ran["route"] == 3 * num_layers
    kinds = {kind.module_class: kind for kind in plan.kinds}
    for name in ("MaskedMixture", "SortedMixture"):
        assert {fusion.fuser for fusion in kinds[name].fusions} == {"router", "experts", "linear"}, kinds[name].kept
    assert plan.counts_as_fused, plan.shortfall


def test_verify_passes(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The keeper climbed the stairs to look\nDie Stadt lag noch im Nebel\n")
    config = engine_config(folder, dtype="float32", trust_remote_code=True, cache_dir=tmp_path / "cache", num_threads=1)
    source = resolve_model(folder, cache_dir=tmp_path / "cache", trust_remote_code=True)
    report = verify(config, source, Extent(prompts, quick=True), command="", note=lambda text: None)
    assert report.passed, [check for check in report.checks if not check.passed]
