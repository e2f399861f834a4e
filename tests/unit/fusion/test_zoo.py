"""Models of the zoo: what the plan says is what runs, and the table in the documentation is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.fusions import line, row_of

PAGE = Path(__file__).parents[3] / "docs" / "fusion-zoo.md"
# One of each make: plain, packed, encoder-like, several norms, mixtures, latent attention, a refusal, no fusing at all.
TYPES = ("llama", "gpt2", "gpt_neox", "bert", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "ctrl", "gemma4_assistant")


@pytest.mark.parametrize("name", TYPES)
def test_the_page_is_up_to_date(name: str, one_thread: None) -> None:
    row = row_of(name)
    assert line(row) in PAGE.read_text(encoding="utf-8").splitlines(), (
        "run: python -m tests.zoo fusions > docs/fusion-zoo.md"
    )


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "phi3", "falcon_h1", "olmo2", "cohere2", "opt", "jetmoe", "xmod", "gemma3n_text"]
)
def test_everything_is_fused_and_counted(name: str, one_thread: None) -> None:
    row = row_of(name)
    assert row.is_whole, (row.error, row.difference, row.plan and row.plan.shortfall)
    assert row.miscounted == {}
