"""The stop-string automaton against a search of the whole text, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.text.stop_strings import StopMatch, StopStringMatcher


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The first stop string to be complete and where it ends; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    sizes = range(max(map(len, stops), default=1) - 1, 0, -1)
    return next(
        (n for n in sizes if n <= len(text) and any(s.startswith(text[-n:]) and s != text[-n:] for s in stops)), 0
    )


words = st.text(alphabet="ab€", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab€", max_size=6), max_size=8), stops=st.lists(words, max_size=5))
def test_match_and_holdback_equal_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    text = ""
    for piece in pieces:
        match = matcher.read(piece)
        expected = first_stop(text + piece, stops)
        if match is not None:
            assert expected == (match.stop, len(text) + match.end)
            return
        text += piece
        assert expected is None
        assert matcher.num_held == longest_beginning(text, stops)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="ab", max_size=30), stops=st.lists(words, min_size=1, max_size=5))
def test_reading_goes_on_after_a_match(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    ends = [end for end, char in enumerate(text, 1) if matcher.read(char)]
    assert ends == [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert matcher.num_held == longest_beginning(text, stops)


@pytest.mark.parametrize(
    ("stops", "text", "match"),
    [
        (["abcd", "bc"], "xabcd", StopMatch("bc", 4)),
        (["c", "bc", "abc"], "xabc", StopMatch("abc", 4)),
        (["a", "ab"], "ab", StopMatch("a", 1)),
        (["aab"], "aaaab", StopMatch("aab", 5)),
        (["\n\n"], "a\nb\n\nc", StopMatch("\n\n", 5)),
        (["abc"], "ab", None),
        ([], "abc", None),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, match: StopMatch | None) -> None:
    assert StopStringMatcher(stops).read(text) == match
