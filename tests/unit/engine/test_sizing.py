"""How many blocks the cache gets and how long a request may be, from numbers that stand here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transfuse.cache.groups import CacheGroup
from transfuse.config import CacheConfig
from transfuse.engine import sizing
from transfuse.engine.sizing import CacheSize, available_memory, size_cache
from transfuse.errors import ConfigError

FULL = CacheGroup(0, "full", None, (0, 1))
SLIDING = CacheGroup(1, "sliding", 100, (2, 3))
MIB = 2**20


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1 GiB left."""
    monkeypatch.setattr(sizing, "available_memory", lambda: 2**30)


def size(cache: CacheConfig | None = None, *groups: CacheGroup, **changes: Any) -> CacheSize:
    arguments = {
        "bytes_per_block": MIB,
        "model_max_len": 1600,
        "max_model_len": None,
        "max_num_seqs": 4,
        "max_chunk": 64,
    }
    return size_cache(cache or CacheConfig(), groups or (FULL,), **(arguments | changes))


def test_the_pool_takes_what_full_requests_could_use() -> None:
    # 100 blocks a request, and the null block; half of 1 GiB would be 512 blocks.
    assert size() == CacheSize(1600, 401, 401 * MIB, 6400, 4)
    assert size().num_full_requests == 4


def test_the_pool_takes_its_share_of_memory_at_most() -> None:
    found = size(max_num_seqs=64)
    assert (found.num_blocks, found.num_bytes) == (512, 512 * MIB)
    assert found.num_tokens == 511 * 16
    assert found.num_full_requests == pytest.approx(5.11)
    assert size(CacheConfig(memory_share=0.25), max_num_seqs=64).num_blocks == 256


def test_bytes_and_blocks_are_taken_as_given() -> None:
    assert size(CacheConfig(memory_bytes=300 * MIB + 5)).num_blocks == 300
    assert size(CacheConfig(memory_bytes=4000 * MIB)).num_blocks == 4000, "more than is needed, and than there is"
    assert size(CacheConfig(num_blocks=101, memory_bytes=MIB)).num_blocks == 101


def test_a_window_keeps_less() -> None:
    # A window of 100, a chunk of 64 and a block on the border: 180 tokens, 12 blocks; full attention 100 blocks.
    found = size(None, FULL, SLIDING)
    assert found.num_blocks == 4 * (100 + 12) + 1
    assert found.num_tokens == 6400
    assert size(None, SLIDING).num_blocks == 4 * 12 + 1
    assert size(None, SLIDING, max_model_len=32).num_blocks == 4 * 2 + 1, "no more than the request has"


def test_the_length_is_the_callers_or_the_models() -> None:
    assert size(max_model_len=160) == CacheSize(160, 41, 41 * MIB, 640, 4)
    with pytest.raises(ConfigError, match="max_model_len is 1601, but the model was made for 1600 tokens"):
        size(max_model_len=1601)


def test_a_length_that_was_not_asked_for_is_lowered_and_said(caplog: pytest.LogCaptureFixture) -> None:
    found = size(CacheConfig(num_blocks=51))
    assert (found.max_model_len, found.num_blocks, found.num_full_requests) == (800, 51, 1)
    assert "requests of up to 800 tokens; the model would take 1600" in caplog.text


def test_the_longest_that_fits_is_found_with_windows_too() -> None:
    groups = (FULL, SLIDING)
    found = size(CacheConfig(num_blocks=51), *groups).max_model_len
    assert found == (50 - 12) * 16
    assert size(CacheConfig(num_blocks=51), *groups, max_model_len=found).max_model_len == found
    with pytest.raises(ConfigError, match=f"Set max_model_len to {found} or less"):
        size(CacheConfig(num_blocks=51), *groups, max_model_len=found + 1)


def test_a_length_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        size(CacheConfig(memory_bytes=51 * MIB), max_model_len=1600)
    assert str(error.value) == (
        "A request of max_model_len=1600 tokens needs 100 cache blocks (0.10 GiB); the cache has 50 (0.05 GiB, of "
        "1.00 GiB available). Set max_model_len to 800 or less, or give the cache more memory (kv_cache_memory_bytes)."
    )


@pytest.mark.parametrize("cache", [CacheConfig(memory_bytes=1), CacheConfig(memory_bytes=MIB)])
def test_a_cache_without_a_usable_block_is_refused(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match="the cache has 0 "):
        size(cache)


def test_no_memory_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: -5)
    with pytest.raises(ConfigError, match="the cache has 0 "):
        size()


def test_blocks_without_bytes_only_count_tokens() -> None:
    found = size(bytes_per_block=0, max_num_seqs=1)
    # Bytes for a cache that takes none must not become blocks without end.
    assert size(CacheConfig(memory_bytes=2**29), bytes_per_block=0, max_num_seqs=1) == found
    assert (found.max_model_len, found.num_bytes, found.num_full_requests) == (1600, 0, 1)


def test_states_and_blocks_share_the_memory() -> None:
    found = size(bytes_per_state=8 * MIB)
    assert found == CacheSize(1600, 401, (401 + 4 * 8) * MIB, 6400, 4)
    # 512 MiB for all; at most half of it for states.
    found = size(bytes_per_state=8 * MIB, max_num_seqs=64)
    assert (found.max_num_seqs, found.num_blocks, found.num_bytes) == (32, 256, 512 * MIB)
    found = size(CacheConfig(num_blocks=300), bytes_per_state=8 * MIB, max_num_seqs=64)
    assert (found.max_num_seqs, found.num_blocks) == (32, 300)


def test_fewer_requests_than_asked_for_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    size(bytes_per_state=8 * MIB, max_num_seqs=64)
    assert "the cache holds the states of 32 requests at once; asked for were 64" in caplog.text


def test_states_without_blocks_take_all_the_memory() -> None:
    found = size_cache(
        CacheConfig(),
        (),
        bytes_per_block=0,
        bytes_per_state=8 * MIB,
        model_max_len=1600,
        max_model_len=None,
        max_num_seqs=100,
        max_chunk=64,
    )
    assert found == CacheSize(1600, 2, 512 * MIB, 64 * 1600, 64)


def test_a_state_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 0.50 GiB for its states; the cache has 0.25 GiB for them"):
        size(bytes_per_state=512 * MIB)


def _cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.undo()  # the whole machine's memory above
    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * MIB))
    monkeypatch.setattr(sizing, "Path", lambda path: folder if path == "/sys/fs/cgroup" else Path(path))


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(5 * MIB, 3 * MIB, 2 * MIB), (50 * MIB, MIB, 8 * MIB), ("max", MIB, 8 * MIB)],
)
def test_the_control_groups_limit_counts(
    limit: object, used: int, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    _cgroup(monkeypatch, tmp_path)
    assert available_memory() == expected


def test_without_a_control_group_the_machines_memory_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cgroup(monkeypatch, tmp_path)
    assert available_memory() == 8 * MIB
