from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse.cli.sizes import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2048", 2048),
        (" 16 ", 16),
        ("25.6k", 25_600),
        ("1K", 1024),
        ("2m", 2_000_000),
        ("2M", 2 * 1024**2),
        ("1g", 10**9),
        ("1T", 1024**4),
        ("512B", 512),
        ("4kb", 4000),
        ("4 GB", 4 * 10**9),
        ("4GiB", 4 * 1024**3),
        ("4gib", 4 * 1024**3),
        ("1.5MiB", 3 * 1024**2 // 2),
        ("0.1GiB", 107_374_182),
    ],
)
def test_reads_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.5B", "4iB", "4x", "4kk", "1e3", "0x10", "4 G B", "nan"])
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@given(st.integers(0, 10**15))
def test_plain_numbers_are_themselves(number: int) -> None:
    assert parse_size(str(number)) == number


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (1500 * 1024, "1.46 MiB"),
        (23_500 * 1024**2, "22.9 GiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_writes_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
