from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse.server.json_guard import JsonError, JsonGuard


def refuses(body: bytes, sizes: list[int], max_depth: int) -> bool:
    guard = JsonGuard(max_depth)
    start = 0
    try:
        for size in [*sizes, len(body)]:
            guard.feed(body[start : start + size], final=start + size >= len(body))
            start += size
    except JsonError:
        return True
    return False


def depth(body: bytes) -> int:
    """Slow and plain."""
    level = deepest = 0
    in_string = escaped = False
    for char in body.decode():
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        else:
            level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(char, 0)
            deepest = max(deepest, level)
    return deepest


@given(
    st.text('[]{}"\\aé', max_size=60).map(str.encode),
    st.lists(st.integers(1, 9), max_size=20),
)
def test_depth_is_found_whatever_the_chunks(body: bytes, sizes: list[int]) -> None:
    assert refuses(body, sizes, 3) == (depth(body) > 3)


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'""', b"[],", b'"\\', b"a", b"\\", b'"a",'])
def test_work_grows_no_faster_than_the_body(piece: bytes) -> None:
    def seconds(num_bytes: int) -> float:
        body = b'"' + piece * (num_bytes // len(piece))
        guard = JsonGuard(64)
        start = time.process_time()
        guard.feed(body, final=True)
        return time.process_time() - start

    # Quadratic work would take half an hour for the larger one.
    assert seconds(2**21) < 10
