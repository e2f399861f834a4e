from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.inspect.models import report_of
from tests.zoo import tiny_config
from transfuse.inspect import report
from transfuse.inspect.implementation import Expected


def test_latents_are_read_once_for_all_heads(tmp_path: Path) -> None:
    config = tiny_config("minicpm3")
    heads, rank, shared = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    found = report_of(config, tmp_path)
    assert [fusion.fuser for kind in found.plan.kinds for fusion in kind.fusions].count("mla") == 1
    layers = config.num_hidden_layers
    (element,) = {layer.element_bytes for layer in found.costs.attention}
    assert found.costs.cache_bytes(100) == layers * (rank + shared) * element * 100
    assert found.costs.attention_flops(100) == layers * 2 * heads * (rank + shared + rank) * 100


def test_where_it_is_not_fused_keys_and_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("minicpm3")
    monkeypatch.setattr(report, "expected_implementation", lambda *_: Expected("plain", "on purpose"))
    found = report_of(config, tmp_path)
    dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    (element,) = {layer.element_bytes for layer in found.costs.attention}
    numbers = config.num_hidden_layers * config.num_attention_heads * dims
    assert found.costs.cache_bytes(100) == numbers * element * 100
