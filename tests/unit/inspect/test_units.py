from __future__ import annotations

import pytest

from transfuse.inspect.units import format_bytes, format_count, format_flops, short_path


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 K"), (134_515_008, "135 M"), (7_241_732_096, "7.24 B"), (999_600, "1.00 M")],
)
def test_counts(value: int, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 FLOP"), (1.5, "1.50 FLOP"), (268_959_744, "269 MFLOP"), (43.1e9, "43.1 GFLOP")]
)
def test_flops(value: float, text: str) -> None:
    assert format_flops(value) == text


def test_bytes() -> None:
    assert [format_bytes(value) for value in (512, 269031168, 43136875520)] == ["512 B", "257 MiB", "40.2 GiB"]


def test_paths_of_packages_are_short() -> None:
    assert short_path("/venv/lib/python3.11/site-packages/transformers/x.py") == "transformers/x.py"
    assert short_path("/home/me/model.py") == "/home/me/model.py"
