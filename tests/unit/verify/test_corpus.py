from __future__ import annotations

from pathlib import Path

import pytest

from transfuse.errors import ConfigError
from transfuse.verify.corpus import NUM_QUICK, TEXTS, corpus


def test_a_quick_run_takes_a_few() -> None:
    assert corpus(None, quick=False) == list(TEXTS)
    assert corpus(None, quick=True) == list(TEXTS[:NUM_QUICK])


def test_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two\n \nthree", encoding="utf-8")
    assert corpus(path, quick=False) == ["one", "  two", "three"]


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff\xfe"])
def test_a_wrong_file_is_the_user_s_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"prompts\.txt"):
        corpus(path, quick=False)
