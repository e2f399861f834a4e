"""Models whose code a ragged batch would get wrong run otherwise, say why, and answer as `generate` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from transfuse import LLM, SamplingParams
from transfuse.errors import RemoteCodeError, UnsupportedModelError

NUM_TOKENS = 12
PROMPTS = [[5, 9, 200, 31, 77, 140, 8], [300], [44, 45, 46, 47]]


@pytest.fixture
def planted(
    tmp_path: Path, zoo_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """A function from a fault to a folder with a small Llama that has it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def folder(fault: str) -> Path:
        path = tmp_path / "planted_model"
        shutil.copytree(zoo_folder("llama"), path)
        shutil.copy(Path(__file__).parent / "planted" / "modeling_planted.py", path)
        config = json.loads((path / "config.json").read_text())
        names = {"AutoConfig": "PlantedConfig", "AutoModelForCausalLM": "PlantedForCausalLM"}
        config |= {
            "model_type": "planted",
            "fault": fault,
            "architectures": ["PlantedForCausalLM"],
            "auto_map": {auto: f"modeling_planted.{name}" for auto, name in names.items()},
        }
        (path / "config.json").write_text(json.dumps(config))
        return path

    return folder


def _generated(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


def _run(folder: Path, cache_dir: Path, **settings: object) -> tuple[str, str, list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(
        folder, dtype="float32", trust_remote_code=True, cache_dir=cache_dir, show_progress=False, **settings
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        return llm.model_impl, llm.model_impl_reason, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("convolves", "logits of a shrunk instance differ when run"),
        ("scales the row", "logits of a shrunk instance differ when run"),
    ],
)
def test_faults_run_as_the_original(fault: str, reason: str, planted: Callable[[str], Path], tmp_path: Path) -> None:
    folder = planted(fault)
    implementation, why, tokens = _run(folder, tmp_path / "cache")
    assert implementation == "original"
    assert reason in why
    assert tokens == _generated(folder)

    for asked in ("fused", "plain"):
        with pytest.raises(UnsupportedModelError, match=f"model_impl='{asked}' cannot run PlantedForCausalLM"):
            LLM(
                folder,
                dtype="float32",
                trust_remote_code=True,
                cache_dir=tmp_path / "cache",
                show_progress=False,
                model_impl=asked,
            )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ignores its mask", "cache layer 0 is written and never attended to"),
        ("gives no mask", "ForgetfulAttention gives attention no mask"),
    ],
)
def test_what_is_right_for_whole_texts_only_is_given_no_others(
    fault: str, reason: str, planted: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without a mask, torch takes the first of several new tokens for the first of the text."""
    folder = planted(fault)
    implementation, why, tokens = _run(folder, tmp_path / "cache", max_num_batched_tokens=64)
    assert implementation == "fused"
    assert "in chunks, as its own forward's do, so that prompts are computed whole and prefixes are not shared" in why
    assert reason in why
    assert tokens == _generated(folder)


@pytest.mark.parametrize("fault", ["", "scales"])
def test_what_is_no_fault_runs_fused(fault: str, planted: Callable[[str], Path], tmp_path: Path) -> None:
    """Code after `lm_head` is the model's own and runs; only what mixes rows is a fault."""
    folder = planted(fault)
    implementation, why, tokens = _run(folder, tmp_path / "cache")
    assert implementation == "fused", why
    assert tokens == _generated(folder)


def test_trusting_the_plan_skips_the_check(planted: Callable[[str], Path], tmp_path: Path) -> None:
    """And the tokens are wrong: what the check is for."""
    folder = planted("convolves")
    implementation, why, tokens = _run(folder, tmp_path / "cache", trust_plan=True)
    assert implementation == "fused"
    assert "trust_plan" in why
    assert tokens != _generated(folder)


def test_custom_code_needs_permission(planted: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(RemoteCodeError, match="trust-remote-code"):
        LLM(planted(""), cache_dir=tmp_path, show_progress=False)
