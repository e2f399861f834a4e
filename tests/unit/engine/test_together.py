"""Which requests a model's own `generate` may run as one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.zoo import build
from transfuse.engine import together
from transfuse.engine.original_runner import Together
from transfuse.engine.own_generate import OwnGenerate
from transfuse.engine.together import find_together

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = {
    # Masks and positions know of padding; positions do not; buckets of the whole text; states in its modules.
    "openai-gpt": Together.PADDED,
    "xlm": Together.EQUAL_LENGTHS,
    "reformer": Together.NONE,
    "recurrent_gemma": Together.NONE,
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_exact_is_found(name: str, tmp_path: Path) -> None:
    assert find_together(build(name), tmp_path) is FOUND[name]


def test_the_second_time_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_together(build("llama"), tmp_path)
    monkeypatch.setattr(together, "_check", lambda *_: pytest.fail("it is known already"))
    assert find_together(build("llama", seed=1), tmp_path) is first is Together.PADDED


def test_a_fault_in_padding_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor
    monkeypatch.setattr(
        "transfuse.engine.own_generate.torch.tensor",
        lambda data, **rest: own(data, **rest) * 0 + 1 if _is_mask(data) else own(data, **rest),
    )
    assert find_together(build("llama"), tmp_path) is Together.EQUAL_LENGTHS


def _is_mask(data: object) -> bool:
    return isinstance(data, list) and all(isinstance(row, list) and set(row) <= {0, 1} for row in data)


def test_rows_that_take_each_others_tokens_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = OwnGenerate.advance
    monkeypatch.setattr(OwnGenerate, "advance", lambda self, tokens: advance(self, tokens[::-1]))
    assert find_together(build("llama"), tmp_path) is Together.NONE


def test_what_cannot_be_shrunk_runs_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_shrunk(*_: object, **__: object) -> None:
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(together, "build_shrunk", build_shrunk)
    assert find_together(build("llama"), tmp_path) is Together.NONE
