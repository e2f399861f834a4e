from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.cache.prefix_hash import _digest, block_digest, root_digest

Sequence = tuple[bytes, int, int, list[list[int]]]


def chain(salt: bytes, weights_version: int, block_size: int, blocks: list[list[int]]) -> bytes:
    digest = root_digest(salt=salt, weights_version=weights_version, block_size=block_size)
    for tokens in blocks:
        digest = block_digest(digest, tokens)
    return digest


SEQUENCES = st.tuples(
    st.binary(max_size=3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 2**31), max_size=3), max_size=3),
)


@given(first=SEQUENCES, second=SEQUENCES)
@settings(max_examples=300, deadline=None)
def test_digests_are_equal_exactly_where_everything_is(first: Sequence, second: Sequence) -> None:
    assert (chain(*first) == chain(*second)) == (first == second)
    assert chain(*first) == chain(*first)


def test_each_field_counts() -> None:
    base = chain(b"s", 0, 4, [[1, 2], [3, 4]])
    others = [
        chain(b"", 0, 4, [[1, 2], [3, 4]]),
        chain(b"s", 1, 4, [[1, 2], [3, 4]]),
        chain(b"s", 0, 8, [[1, 2], [3, 4]]),
        chain(b"s", 0, 4, [[9, 2], [3, 4]]),
        chain(b"s", 0, 4, [[1, 2], [4, 3]]),
        chain(b"s", 0, 4, [[1, 2, 3], [4]]),
        chain(b"s", 0, 4, [[1, 2]]),
        chain(b"s", 0, 4, [[1, 2], []]),
    ]
    assert len({base, *others}) == len(others) + 1


def test_bytes_do_not_move_between_fields() -> None:
    fields = [((b"a", b"bc"),), ((b"ab", b"c"),), ((b"a", b"b"), (b"c", b"")), ((b"a", b""), (b"b", b"c"))]
    assert len({_digest(*each) for each in fields}) == len(fields)
