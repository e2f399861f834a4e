"""The author's file and line of an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from transfuse.rewrite.code_places import author_place, code_place, described, in_folder
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.source import method_source


class Block(nn.Module):
    def forward(
        self,
        x: torch.Tensor,
        divide: bool = False,
    ) -> torch.Tensor:
        """A text
        of two lines."""
        y = x + (
            1 if self.training
            else 2
        )  # fmt: skip

        if divide:
            raise ZeroDivisionError("no")  # here
        return y @ x


def _line(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {comment}")]
    return found


def _raised(call: object, *arguments: object) -> Exception:
    assert callable(call)
    with pytest.raises(Exception) as caught:
        call(*arguments)
    return caught.value


def test_the_lines_of_rewritten_code_are_the_authors() -> None:
    source = method_source(Block.forward)
    rewritten = compile_method(source, source.tree)
    error = _raised(rewritten.function, Block(), torch.ones(2, 3), True)
    assert code_place(error) == (__file__, _line("here"))
    # Raised by torch, in the line after it.
    error = _raised(rewritten.function, Block(), torch.ones(2, 3))
    assert code_place(error) == (__file__, _line("here") + 1)
    assert author_place(error, None) == f" ({__file__}:{_line('here') + 1})"


def test_helpers_beside_a_module_count_and_those_elsewhere_do_not() -> None:
    class Calls(nn.Module):
        def forward(self, x: object) -> object:
            return Path(x)  # of the standard library

    assert code_place(_raised(Calls(), 3)) == (__file__, _line("of the standard library"))


def test_what_says_nothing_is_described_by_its_line() -> None:
    def holds() -> None:
        assert 1 > 2

    # pytest rewrites assertions of its own files, and says more.
    assert described(_raised(holds)).startswith("AssertionError: assert 1 > 2")
    assert described(ValueError("one\ntwo")) == "ValueError: one"
    assert described(ValueError()) == "ValueError: no message"
    assert code_place(ValueError()) is None and author_place(ValueError(), None) == ""


def test_copies_are_shown_as_what_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("modeling.py", "parts/blocks.py"):
        (tmp_path / name).touch()
    copies = "/cache/transformers_modules/model/0123"
    assert in_folder(f"{copies}/modeling.py", tmp_path) == str(tmp_path / "modeling.py")
    assert in_folder(f"{copies}/parts/blocks.py", tmp_path) == str(tmp_path / "parts" / "blocks.py")
    assert in_folder(f"{copies}/other.py", tmp_path) == f"{copies}/other.py"
    assert in_folder("/lib/modeling.py", tmp_path) == "/lib/modeling.py"
    assert in_folder(f"{copies}/modeling.py", None) == f"{copies}/modeling.py"
