"""How the parts of an engine are put together, and what its summary tells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.zoo import build
from transfuse.config import CacheConfig, EngineConfig, ModelConfig
from transfuse.engine import choice
from transfuse.engine.build import BuiltEngine, build_engine
from transfuse.engine.module_start import model_max_len
from transfuse.errors import ConfigError
from transfuse.kernels.cpu import loading
from transfuse.kernels.cpu.loading import LoadedKernels
from transfuse.models.resolve import resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert model_max_len(config) == expected


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
    assert (summary.implementation, summary.dtype) == ("fused", "float32")
    assert summary.reason.startswith("checked against the original on a shrunk instance")
    assert summary.num_fused_linears == summary.num_linears == 7 * model.config.num_hidden_layers + 1
    assert summary.reason.endswith(f"; fused ({summary.num_linears} of {summary.num_linears} linears)")
    assert 0 < summary.analysis_seconds < 60
    assert engine.plan is not None and engine.plan.counts_as_fused
    assert summary.num_parameters == sum(p.numel() for p in model.parameters())
    assert (summary.max_model_len, summary.max_num_seqs, summary.prefix_caching) == (160, 3, True)
    assert summary.cache_tokens == 199 * 16
    # Keys and values, float32, of every layer and key head.
    config = model.config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert summary.cache_bytes == 200 * 16 * per_token
    assert summary.full_requests == 19.9
    engine.core.close()


def test_the_original_runs_whole_requests_as_far_as_is_exact(built: Callable[..., BuiltEngine]) -> None:
    engine = built("cpmant", max_model_len=160, max_num_seqs=6, max_num_batched_tokens=32)
    summary = engine.summary
    assert (summary.implementation, summary.max_num_seqs, summary.prefix_caching) == ("original", 6, False)
    assert summary.reason.endswith("; requests that come together as one batch, padded to equal length")
    assert summary.reason.startswith("neither fused nor plain, since CpmAntModel.forward (modeling_cpmant.py:")
    assert "computes with a cache length, which a ragged batch does not have" in summary.reason
    assert (summary.cache_tokens, summary.cache_bytes, summary.kernels) == (None, 0, "torch")
    assert (summary.num_linears, summary.num_fused_linears, engine.plan) == (None, None, None)
    engine.core.close()


def test_a_model_with_states_shares_no_prefixes_and_says_so(built: Callable[..., BuiltEngine]) -> None:
    engine = built("qwen3_next", max_model_len=160, max_num_seqs=5, max_num_batched_tokens=64)
    summary, runner = engine.summary, engine.core.engine.runner
    assert (summary.implementation, summary.max_num_seqs, summary.prefix_caching) == ("fused", 5, False)
    assert "Qwen3NextGatedDeltaNet keeps a state of each request, so that prefixes are not shared" in summary.reason
    assert summary.cache_bytes == 200 * runner.bytes_per_block(16) + 5 * runner.bytes_per_state
    engine.core.close()


def test_states_alone_bound_the_requests(built: Callable[..., BuiltEngine]) -> None:
    engine = built("mamba2", cache={"num_blocks": None, "memory_bytes": 2**20}, max_num_seqs=500)
    summary, runner = engine.summary, engine.core.engine.runner
    assert summary.max_num_seqs == 2**20 // runner.bytes_per_state < 500
    assert summary.cache_bytes == summary.max_num_seqs * runner.bytes_per_state
    assert summary.full_requests == summary.max_num_seqs
    engine.core.close()


def test_the_summary_tells_which_kernels_run(
    built: Callable[..., BuiltEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def load(cache_dir: Path, progress: object) -> LoadedKernels:
        asked.append((cache_dir, progress))
        return LoadedKernels(None, "no C++ compiler found: install g++")

    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.setattr(loading, "_load_or_say_why", load)
    for implementation, kernels in [("plain", "torch"), ("fused", "torch (no C++ compiler found: install g++)")]:
        engine = built("llama", {"model_impl": implementation, "trust_plan": True})
        assert engine.summary.kernels == kernels
        engine.core.close()
    assert asked == [(tmp_path, None)]


def test_tied_weights_count_once(built: Callable[..., BuiltEngine]) -> None:
    engine = built("gpt2")
    model = build("gpt2")
    assert model.config.tie_word_embeddings
    assert engine.summary.num_parameters == sum(p.numel() for p in model.parameters())
    engine.core.close()


def test_threads_are_set_before_loading(built: Callable[..., BuiltEngine]) -> None:
    before = torch.get_num_threads()
    try:
        engine = built("llama", num_threads=1)
        assert torch.get_num_threads() == engine.summary.num_threads == 1
        engine.core.close()
    finally:
        torch.set_num_threads(before)


def test_weights_that_are_read_as_one_lie_together_from_the_start(built: Callable[..., BuiltEngine]) -> None:
    engine = built("llama")
    attention = engine.core.engine._runner._model.model.layers[0].self_attn
    joined = attention.qkv_proj_weight
    assert joined.data_ptr() == attention.q_proj.weight.data_ptr()
    assert (
        joined.untyped_storage().data_ptr()
        == engine.core.engine._runner._model.lm_head.weight.untyped_storage().data_ptr()
    )
    assert joined.shape[0] == sum(p.weight.shape[0] for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    engine.core.close()


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_nobody_analyses_what_will_not_be_fused(implementation: str, built: Callable[..., BuiltEngine]) -> None:
    engine = built("llama", {"model_impl": implementation, "trust_plan": True})
    assert engine.plan is None
    assert engine.summary.analysis_seconds < 0.01
    engine.core.close()


@pytest.mark.parametrize("implementation", ["fused", "plain", "original"])
def test_a_failure_after_loading_closes_the_runner(
    implementation: str, built: Callable[..., BuiltEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    for cls in (choice.PlainRunner, choice.OriginalRunner):
        close = cls.close
        monkeypatch.setattr(cls, "close", lambda self, close=close: (closed.append(self.implementation), close(self)))
    with pytest.raises(ConfigError, match="the model was made for"):
        built("llama", {"model_impl": implementation, "trust_plan": True}, max_model_len=10**6)
    assert closed == [implementation]
    assert not [thread for thread in threading.enumerate() if thread.name == "transfuse-original"]
