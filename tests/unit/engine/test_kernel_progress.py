from __future__ import annotations

import pytest

from transfuse.engine.kernel_progress import compiling_shown


def test_a_bar_follows_the_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    with compiling_shown(show_progress=True) as progress:
        assert progress is not None
        for done, name in enumerate(["", "one.cpp", "two.cpp", "kernels.so"]):
            progress(done, 3, name)
    captured = capsys.readouterr()
    assert "Compiling kernels for this machine, once" in captured.err and "3/3" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_shows_where_nothing_is_compiled(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with compiling_shown(show_progress=shown) as progress:
        assert (progress is not None) == shown
    assert capsys.readouterr() == ("", "")
