"""How types are served is found by serving them, and told as it was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.zoo import served as served_module
from tests.zoo.served import Served, page, read_rows, served, write_rows
from tests.zoo.watch import changes

ROW = Served("llama", "fused", "checked", "15/15", "avx2", ("full",), True, {"alone": "yes", "tiny cache": "yes"})


def test_a_type_is_served_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "NUM_TOKENS", 24)
    row = served("gemma2")
    assert (row.implementation, row.prefix_caching) == ("fused", True)
    assert list(row.caches) == ["sliding 8", "full"]
    assert row.scenarios == dict.fromkeys(served_module.COLUMNS, "yes")


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "NUM_TOKENS", 2)
    monkeypatch.setattr(served_module, "generated", lambda folder, prompts, num: [[0] * num for _ in prompts])
    row = served("llama")
    assert not row.is_exact
    assert row.scenarios["alone"] == "9 of 9 differ"


def test_what_does_not_run_says_why() -> None:
    row = served("gemma4_assistant")
    assert row.implementation == "" and row.reason.startswith("does not run by itself: ")


def test_rows_are_kept(tmp_path: Path) -> None:
    write_rows([ROW, replace(ROW, name="opt")], tmp_path / "rows.jsonl")
    rows = read_rows(tmp_path / "rows.jsonl")
    assert list(rows) == ["llama", "opt"]
    assert list(changes({"llama": ROW, "opt": replace(ROW, name="opt")}, rows)) == []


def test_the_page_tells_what_is_missing() -> None:
    original = Served("rwkv", "original", "no | ragged batch", scenarios={"alone": "yes", "mixed": "1 of 9 differ"})
    text = page([ROW, original, Served("blt", "", "does not run")])
    assert "Of 3 types 2 run: 1 `fused`, 0 `plain`, 1 `original`. Exact in every way that applies: 1." in text
    assert "| llama | fused | 15/15 | avx2 | full | yes | yes |  |" in text
    assert "| packed: 1 of 9 differ | no \\| ragged batch |" in text
    assert "| blt | none | | | | | | does not run |" in text
    assert "## Variants" not in text


def test_variants_have_a_table_of_their_own_and_whole_texts_a_reason() -> None:
    whole = replace(ROW, name="doge:moe", reason="only whole", whole_texts=True)
    types, _, variants = page([ROW, whole]).partition("## Variants")
    assert "Of 1 types 1 run: 1 `fused`" in types and "doge:moe" not in types
    assert "Of 1 variants 1 run: 1 `fused`" in variants
    assert "| doge:moe | fused | 15/15 | avx2 | full | yes | yes | only whole |" in variants


def test_changes_are_told_by_type() -> None:
    after = {
        "llama": replace(ROW, linears="14/15"),
        "new": replace(ROW, name="new"),
        "mpt": replace(ROW, name="mpt", scenarios={"alone": "2 of 9 differ"}),
    }
    before = {"llama": ROW, "mpt": replace(ROW, name="mpt"), "old": replace(ROW, name="old")}
    assert list(changes(before, after)) == [
        "llama: fused (15/15 linears), exact -> fused (14/15 linears), exact",
        "mpt: fused (15/15 linears), exact -> fused (15/15 linears), not exact (alone: 2 of 9 differ)",
        "new: new, fused (15/15 linears), exact",
        "old: gone",
    ]
