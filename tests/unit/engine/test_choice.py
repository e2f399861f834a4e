"""Which implementation a model gets and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tests.zoo import build
from transfuse.config import ModelConfig
from transfuse.engine import choice
from transfuse.engine.choice import choose
from transfuse.engine.original_runner import Together
from transfuse.engine.verdicts import Verdict
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model

pytestmark = pytest.mark.usefixtures("one_thread")

PASSED = Verdict(True, "checked", "shrunk")
FAILED = Verdict(False, "logits of a shrunk instance differ when run in chunks", "shrunk")
WRONG = Verdict(False, "logits of a shrunk instance differ when run alone with any of LlamaMLP fused", "shrunk")
IN_PART = Verdict(True, "checked", "shrunk", {"LlamaMLP": "logits differ"})
TRUSTED = "not checked against the original: trust_plan was given"
WHOLE = "; fused (15 of 15 linears)"
SINGLY = "; one request at a time"


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """A function from a model, what the two checks find, and settings, to implementation and reason."""

    def chosen(
        model: PreTrainedModel, fused: Verdict | None, plain: Verdict | None, **settings: Any
    ) -> tuple[str, str]:
        for name, verdict in (("check_fused", fused), ("check_model", plain)):

            def check(given: PreTrainedModel, cache_dir: Path, verdict: Verdict | None = verdict) -> Verdict:
                assert verdict is not None, "the check is not asked for"
                assert (given, cache_dir) == (model, tmp_path)
                return verdict

            monkeypatch.setattr(choice, name, check)
        monkeypatch.setattr(choice, "find_together", lambda *_: Together.NONE)
        found = choose(model, None, ModelConfig(cache_dir=tmp_path, **settings))
        found.runner.close()
        assert (found.plan is not None) == (found.runner.implementation == "fused")
        return found.runner.implementation, found.reason

    return chosen


@pytest.mark.parametrize(
    ("settings", "fused", "plain", "expected"),
    [
        ({}, PASSED, None, ("fused", f"checked{WHOLE}")),
        ({}, WRONG, PASSED, ("plain", f"checked; not fused, since {WRONG.reason}")),
        ({}, WRONG, FAILED, ("original", f"not fused, since {WRONG.reason}; not plain, since {FAILED.reason}{SINGLY}")),
        ({}, FAILED, FAILED, ("original", f"neither fused nor plain, since {FAILED.reason}{SINGLY}")),
        ({"trust_plan": True}, None, None, ("fused", f"{TRUSTED}{WHOLE}")),
        ({"model_impl": "fused"}, PASSED, None, ("fused", f"checked{WHOLE}")),
        ({"model_impl": "fused", "trust_plan": True}, None, None, ("fused", f"{TRUSTED}{WHOLE}")),
        ({"model_impl": "plain"}, None, PASSED, ("plain", "checked")),
        ({"model_impl": "plain", "trust_plan": True}, None, None, ("plain", TRUSTED)),
        ({"model_impl": "original"}, None, None, ("original", f"asked for{SINGLY}")),
        ({"model_impl": "original", "trust_plan": True}, None, None, ("original", f"asked for{SINGLY}")),
    ],
)
def test_the_best_that_is_allowed_is_taken(
    settings: dict, fused: Verdict | None, plain: Verdict | None, expected: tuple, chosen: Callable, llama: Any
) -> None:
    assert chosen(llama, fused, plain, **settings) == expected


def test_what_was_refused_stays_as_it_is_and_the_reason_says_so(chosen: Callable, llama: PreTrainedModel) -> None:
    implementation, reason = chosen(llama, IN_PART, None)
    assert implementation == "fused"
    assert reason == (
        "checked; fused in part (9 of 15 linears): 8 of 14 linears of the decoder layers run in fused ops "
        "(LlamaMLP: logits differ)"
    )


def test_the_plan_is_of_what_runs(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "check_fused", lambda *_: IN_PART)
    found = choose(llama, analyse_model(llama), ModelConfig(cache_dir=tmp_path))
    assert found.plan is not None
    (mlp,) = [kind for kind in found.plan.kinds if kind.module_class == "LlamaMLP"]
    assert (mlp.status, mlp.fusions) == ("refused", ())
    assert {kept.reason for kept in mlp.kept} == {"logits differ"}
    assert type(llama.model.layers[0].mlp) is LlamaMLP
    assert type(llama.model.layers[0].self_attn) is not LlamaAttention
    found.runner.close()


@pytest.mark.parametrize(("asked", "verdict"), [("plain", FAILED), ("fused", WRONG)])
def test_what_is_asked_for_and_refused_is_an_error(
    asked: str, verdict: Verdict, chosen: Callable, llama: PreTrainedModel
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        chosen(llama, verdict, verdict, model_impl=asked)
    assert str(error.value) == (
        f"model_impl='{asked}' cannot run LlamaForCausalLM: {verdict.reason}. Use 'auto' or 'original'."
    )


@pytest.mark.parametrize("verdict", [PASSED, None])
def test_what_the_loaded_model_refuses_counts_whatever_was_checked(verdict: Verdict | None, chosen: Callable) -> None:
    """A shrunk instance, or trust, cannot vouch for code that does not run."""
    cpmant, trust = build("cpmant"), verdict is None
    reason = (
        r"CpmAntModel.forward \(modeling_cpmant.py:\d+\) computes with a cache length, [\w ]+; and request by request: "
        r"cache layer 0 \(DynamicLayer\) keeps .keys, which is not for each token"
    )
    implementation, why = chosen(cpmant, verdict, verdict, trust_plan=trust)
    assert implementation == "original"
    assert re.fullmatch(f"neither fused nor plain, since {reason}{SINGLY}", why)
    for asked in ("fused", "plain"):
        with pytest.raises(UnsupportedModelError, match=f"cannot run CpmAntForCausalLM: {reason}. Use"):
            chosen(cpmant, verdict, verdict, model_impl=asked, trust_plan=trust)


@pytest.mark.parametrize(("together", "most"), [(Together.NONE, 1), (Together.EQUAL_LENGTHS, 8), (Together.PADDED, 8)])
def test_the_original_runs_together_what_is_exact_so(
    together: Together, most: int, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choice, "find_together", lambda *_: together)
    found = choose(llama, None, ModelConfig(cache_dir=tmp_path, model_impl="original"))
    assert (found.runner.max_num_seqs, found.reason) == (most, f"asked for; {together.value}")
    found.runner.close()


def test_a_model_that_is_right_for_whole_texts_only_is_run_so(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, impl in (("check_fused", "fused"), ("check_model", "plain")):
        monkeypatch.setattr(choice, name, lambda *_: Verdict(True, "whole", "shrunk", whole_texts=True))
        found = choose(llama, None, ModelConfig(cache_dir=tmp_path, model_impl=impl))
        assert not found.runner.supports_chunks and not found.runner.shares_prefixes
        found.runner.close()
