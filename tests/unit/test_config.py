from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from transfuse import LLM
from transfuse.config import WatchConfig, default_cache_dir, engine_config, shorten_thread_waits
from transfuse.errors import ConfigError


def test_the_keywords_of_llm_make_a_configuration() -> None:
    wanted = dict(inspect.signature(LLM).parameters)
    del wanted["show_progress"]
    assert dict(inspect.signature(engine_config).parameters) == wanted


def test_settings_reach_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(
        Path("m"), kv_cache_memory_bytes=5, num_kv_blocks=6, scheduling_policy="priority", model_impl="transformers"
    )
    assert config.model.model == "m"
    assert config.model.model_impl == "auto", "vLLM's name for it"
    assert (config.cache.memory_bytes, config.cache.num_blocks, config.policy) == (5, 6, "priority")
    assert config.model.cache_dir == default_cache_dir()
    monkeypatch.setenv("HOME", "/home/somebody")
    assert engine_config(cache_dir="~/c").model.cache_dir == Path("/home/somebody/c")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tick_seconds": 0}, "in this order"),
        ({"tick_seconds": 6.0}, "in this order"),
        ({"unresponsive_seconds": 30.0}, "in this order"),
        ({"max_crashes": 0}, "max_crashes is 0"),
    ],
)
def test_a_watch_that_makes_no_sense_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WatchConfig(**settings)


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_thread_waits_are_short_unless_the_user_has_a_wish(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    shorten_thread_waits()
    assert os.environ.get("GOMP_SPINCOUNT") == (own.get("GOMP_SPINCOUNT") if own else "20000")
    if not own:
        del os.environ["GOMP_SPINCOUNT"]
