"""Which implementation a model gets and why, and how the parts are put together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.zoo import build
from transfuse.config import CacheConfig, EngineConfig, ModelConfig
from transfuse.engine import build as building
from transfuse.engine.build import BuiltEngine, _choose_runner, _model_max_len, build_engine
from transfuse.engine.verdicts import Verdict
from transfuse.errors import ConfigError, UnsupportedModelError
from transfuse.models.resolve import resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")

PASSED = Verdict(True, "checked", "shrunk")
FAILED = Verdict(False, "logits of a shrunk instance differ when run in chunks", "shrunk")


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """A function from a model, what the check finds, and settings, to implementation and reason."""

    def chosen(model: PreTrainedModel, verdict: Verdict | None, **settings: Any) -> tuple[str, str]:
        def check(given: PreTrainedModel, cache_dir: Path) -> Verdict:
            assert verdict is not None, "the check is not asked for"
            assert (given, cache_dir) == (model, tmp_path)
            return verdict

        monkeypatch.setattr(building, "check_model", check)
        runner, reason = _choose_runner(model, ModelConfig(cache_dir=tmp_path, **settings))
        runner.close()
        return runner.implementation, reason

    return chosen


@pytest.mark.parametrize(
    ("settings", "verdict", "expected"),
    [
        ({}, PASSED, ("plain", "checked")),
        ({}, FAILED, ("original", f"not plain, since {FAILED.reason}")),
        ({"model_impl": "plain"}, PASSED, ("plain", "checked")),
        ({"model_impl": "original"}, None, ("original", "asked for")),
        ({"model_impl": "original", "trust_plan": True}, None, ("original", "asked for")),
        ({"trust_plan": True}, None, ("plain", "not checked against the original: trust_plan was given")),
        (
            {"model_impl": "plain", "trust_plan": True},
            None,
            ("plain", "not checked against the original: trust_plan was given"),
        ),
    ],
)
def test_the_best_that_is_allowed_is_taken(
    settings: dict, verdict: Verdict | None, expected: tuple, choose: Callable, llama: PreTrainedModel
) -> None:
    assert choose(llama, verdict, **settings) == expected


def test_plain_asked_for_and_refused_is_an_error(choose: Callable, llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        choose(llama, FAILED, model_impl="plain")
    assert str(error.value) == (
        "model_impl='plain' cannot run LlamaForCausalLM: logits of a shrunk instance differ when run in chunks. "
        "Use 'auto' or 'original'."
    )


@pytest.mark.parametrize("verdict", [PASSED, None])
def test_what_the_loaded_model_refuses_counts_whatever_was_checked(verdict: Verdict | None, choose: Callable) -> None:
    """A shrunk instance, or trust, cannot vouch for code that does not run."""
    bloom, trust = build("bloom"), verdict is None
    reason = "BloomForCausalLM.forward takes no position_ids"
    assert choose(bloom, verdict, trust_plan=trust) == ("original", f"not plain, since {reason}")
    with pytest.raises(UnsupportedModelError, match=f"cannot run BloomForCausalLM: {reason}. Use"):
        choose(bloom, verdict, model_impl="plain", trust_plan=trust)


class Config(SimpleNamespace):
    def get_text_config(self, decoder: bool) -> Any:
        assert decoder
        return getattr(self, "text_config", self)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(max_position_embeddings=4096, n_positions=7), 4096),
        (Config(n_positions=1024), 1024),
        (Config(max_position_embeddings=None, max_seq_len=300), 300),
        (Config(max_position_embeddings=-1, seq_length=200), 200),
        (Config(n_ctx=100), 100),
        (Config(max_position_embeddings=5, text_config=Config(max_position_embeddings=9)), 9),
        (Config(), 2048),
        (Config(max_position_embeddings="many"), 2048),
    ],
)
def test_the_models_own_length(config: Config, expected: int) -> None:
    assert _model_max_len(config) == expected


@pytest.fixture
def built(zoo_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., BuiltEngine]:
    """A function from a zoo name and settings to an engine; the check is kept in a folder of the test's own."""

    def make(name: str, model: dict | None = None, cache: dict | None = None, **settings: Any) -> BuiltEngine:
        source = resolve_model(str(zoo_folder(name)), cache_dir=tmp_path)
        config = EngineConfig(
            model=ModelConfig(cache_dir=tmp_path, dtype="float32", **(model or {})),
            cache=CacheConfig(**({"num_blocks": 200} | (cache or {}))),
            **settings,
        )
        return build_engine(config, source, show_progress=False)

    return make


def test_the_summary_tells_what_was_built(built: Callable[..., BuiltEngine]) -> None:
    engine = built("llama", max_model_len=160, max_num_seqs=3, max_num_batched_tokens=128)
    summary, model = engine.summary, build("llama")
    assert (summary.implementation, summary.dtype) == ("plain", "float32")
    assert summary.reason.startswith("checked against the original on a shrunk instance")
    assert summary.num_parameters == sum(p.numel() for p in model.parameters())
    assert (summary.max_model_len, summary.max_num_seqs, summary.prefix_caching) == (160, 3, True)
    assert summary.cache_tokens == 199 * 16
    # Keys and values, float32, of every layer and key head.
    config = model.config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert summary.cache_bytes == 200 * 16 * per_token
    assert summary.full_requests == 19.9
    engine.engine.close()


def test_the_original_runs_one_whole_request_at_a_time(built: Callable[..., BuiltEngine]) -> None:
    engine = built("mamba", max_model_len=160, max_num_seqs=8, max_num_batched_tokens=32)
    summary = engine.summary
    assert (summary.implementation, summary.max_num_seqs, summary.prefix_caching) == ("original", 1, False)
    assert summary.reason == "not plain, since MambaForCausalLM.forward takes no position_ids"
    assert (summary.cache_tokens, summary.cache_bytes) == (None, 0)
    engine.engine.close()


def test_tied_weights_count_once(built: Callable[..., BuiltEngine]) -> None:
    engine = built("gpt2")
    model = build("gpt2")
    assert model.config.tie_word_embeddings
    assert engine.summary.num_parameters == sum(p.numel() for p in model.parameters())
    engine.engine.close()


def test_threads_are_set_before_loading(built: Callable[..., BuiltEngine]) -> None:
    before = torch.get_num_threads()
    try:
        engine = built("llama", num_threads=1)
        assert torch.get_num_threads() == engine.summary.num_threads == 1
        engine.engine.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_a_failure_after_loading_closes_the_runner(
    implementation: str, built: Callable[..., BuiltEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    for cls in (building.PlainRunner, building.OriginalRunner):
        close = cls.close
        monkeypatch.setattr(cls, "close", lambda self, close=close: (closed.append(self.implementation), close(self)))
    with pytest.raises(ConfigError, match="the model was made for"):
        built("llama", {"model_impl": implementation, "trust_plan": True}, max_model_len=10**6)
    assert closed == [implementation]
    assert not [thread for thread in threading.enumerate() if thread.name == "transfuse-original"]
