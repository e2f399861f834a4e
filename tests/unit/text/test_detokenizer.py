"""Streamed text against the decoding of all tokens at once, with and without stop strings."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from transfuse.text.detokenizer import _MAX_PENDING, IncrementalDetokenizer, TokenDecoder

BROKEN = "\N{REPLACEMENT CHARACTER}"


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = byte_characters()


def spell(data: bytes) -> str:
    return "".join(BYTES[byte] for byte in data)


@cache
def byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes, then some merges, then special tokens."""
    pieces = ["the", " the", "ab", "aab", "\n\n", "é", "€", "😀"]
    pieces_of_bytes = [p.encode() for p in pieces] + [
        b" \xe2\x80",
        b"a\xf0\x9f",
        b"\x98\x80b",
        b"\x82\xac",
        b"\xac\xe2",
    ]
    vocab = {char: i for i, char in enumerate([*BYTES, *map(spell, pieces_of_bytes)])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2: ids 0..255 are the bytes, then pieces whose leading space is dropped at the start of a text."""
    pieces = ["▁", "▁the", "▁a", "a", "b", "ab", "€", "\n\n", "▁▁", "<s>"]
    vocab = {token: i for i, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["▁", "▁the", "▁a", "a", "b", "ab", "€", "\n\n", "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def whole_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The decoding of prompt and output at once, less the prompt's."""
    together = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    return together[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    decoder = TokenDecoder(tokenizer, prompt, skip_special_tokens=skip)
    return [*(decoder.append(token) for token in output), decoder.flush()]


@st.composite
def outputs(draw: st.DrawFn, tokenizer: Tokenizer, *, valid: bool) -> list[int]:
    """Token ids: any at all, or such that bytes come as whole characters."""
    size = tokenizer.get_vocab_size()
    if not valid:
        # Bytes above ASCII often, so that characters get broken in every way.
        odd = st.sampled_from([0x61, 0x80, 0x82, 0xAC, 0xE2, 0xF0, 0x9F, 0xFF])
        return draw(st.lists(st.integers(0, size - 1) | odd, max_size=40))
    if size < 256:
        return draw(st.lists(st.integers(0, size - 1), max_size=30))
    sound = [i for i in range(256, size) if BROKEN not in tokenizer.decode([i], skip_special_tokens=False)]
    characters = st.sampled_from("abc é€😀\n").map(ids_of)
    pieces = draw(st.lists(characters | st.sampled_from(sound).map(lambda i: [i]), max_size=25))
    return list(itertools.chain.from_iterable(pieces))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(TOKENIZERS)), skip=st.booleans())
def test_deltas_join_to_the_whole_text(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = data.draw(outputs(tokenizer, valid=True))
    output = data.draw(outputs(tokenizer, valid=True))
    deltas = stream(tokenizer, prompt, output, skip)
    expected = whole_text(tokenizer, prompt, output, skip)
    assert "".join(deltas) == expected
    assert BROKEN not in expected


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(TOKENIZERS)))
def test_some_special_tokens_can_stay_while_others_go(data: st.DataObject, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    hidden = frozenset(data.draw(st.sets(st.sampled_from(special))))
    mixed = st.lists(outputs(tokenizer, valid=True) | st.sampled_from(special).map(lambda i: [i]), max_size=6)
    prompt, output = (list(itertools.chain.from_iterable(data.draw(mixed))) for _ in range(2))
    decoder = TokenDecoder(tokenizer, prompt, skip_special_tokens=False, hidden=hidden)
    text = "".join([*(decoder.append(token) for token in output), decoder.flush()])
    shown_prompt, shown = ([token for token in ids if token not in hidden] for ids in (prompt, output))
    assert text == whole_text(tokenizer, shown_prompt, shown, False)


@settings(max_examples=200, deadline=None)
@given(output=outputs(byte_level(), valid=False), prompt=outputs(byte_level(), valid=True))
def test_broken_bytes_join_to_the_whole_text_too(output: list[int], prompt: list[int]) -> None:
    tokenizer = byte_level()
    deltas = stream(tokenizer, prompt, output)
    assert "".join(deltas) == whole_text(tokenizer, prompt, output, True)


@pytest.mark.parametrize("size", range(7, 26))
@pytest.mark.parametrize("period", [b"\xff", b"\xe2\x82", b"\x82\xe2", b"\xf0\x9f\x98", b"\xe2"], ids=repr)
def test_long_runs_of_broken_bytes_join_to_the_whole_text_too(period: bytes, size: int) -> None:
    tokenizer = byte_level()
    output = [*(list(period) * size)[:size], *ids_of("a€b")]
    assert "".join(stream(tokenizer, [], output)) == whole_text(tokenizer, [], output, True)


@settings(max_examples=150, deadline=None)
@given(output=outputs(byte_level(), valid=False))
def test_only_the_tokens_of_an_unfinished_character_are_held_back(output: list[int]) -> None:
    tokenizer = byte_level()
    decoder = TokenDecoder(tokenizer, [], skip_special_tokens=True)
    released = ""
    for end, token in enumerate(output, 1):
        released += decoder.append(token)
        text = tokenizer.decode(output[:end])
        assert text.startswith(released)
        assert text.endswith(BROKEN) or released == text
        # Tokens that never become a character are held too, but not without end.
        assert released.startswith(tokenizer.decode(output[: max(end - _MAX_PENDING - 1, 0)]).rstrip(BROKEN))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_are_those_of_decode_stream_on_whole_characters(data: st.DataObject) -> None:
    tokenizer = byte_level()
    output = data.draw(outputs(tokenizer, valid=True))
    theirs = DecodeStream(skip_special_tokens=True)
    assert stream(tokenizer, [], output) == [*((theirs.step(tokenizer, token) or "") for token in output), ""]


def test_a_character_is_released_with_its_last_byte() -> None:
    assert stream(byte_level(), [], ids_of("a😀b")) == ["a", "", "", "", "😀", "b", ""]
    assert stream(byte_fallback(), [], ids_of("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_flushed() -> None:
    assert stream(byte_level(), [], ids_of("a€")[:-1]) == ["a", "", "", BROKEN]
    # The unfinished byte would spoil the whole character before it if they were decoded at once.
    assert stream(byte_fallback(), [], ids_of("€€")[:4]) == ["", "", "€", "", BROKEN]


def test_a_token_that_ends_within_a_character_is_released_with_it() -> None:
    tokenizer = byte_level()
    split = [tokenizer.token_to_id(spell(b"a\xf0\x9f")), tokenizer.token_to_id(spell(b"\x98\x80b"))]
    assert stream(tokenizer, [], split) == ["", "a😀b", ""]
    assert stream(tokenizer, [], split[:1]) == ["", "a" + BROKEN]


def test_text_whose_tokens_all_end_within_a_character_is_released_before_its_end() -> None:
    tokenizer = byte_level()
    output = [0xE2, 0x82, *[tokenizer.token_to_id(spell(b"\xac\xe2")), 0x82] * 30, 0xAC, *ids_of("b")]
    deltas = stream(tokenizer, ids_of("x"), output)
    assert "".join(deltas) == "€" * 31 + "b"
    assert max(map(len, deltas)) <= 8


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("num_special", range(20))
def test_a_character_after_a_run_of_special_tokens_is_whole(name: str, num_special: int) -> None:
    tokenizer = TOKENIZERS[name]()
    special = [tokenizer.token_to_id("<s>")] * num_special
    assert "".join(stream(tokenizer, ids_of("x"), [*special, *ids_of("😀€b")])) == "😀€b"
    assert "".join(stream(tokenizer, ids_of("😀"), [*special, *ids_of("😀€b")])) == "😀€b"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    before, last = ids_of("x€")[:-1], ids_of("€")[-1]
    assert stream(byte_level(), before, [last, *ids_of("b")]) == ["€", "b", ""]


def test_of_a_broken_prompt_only_what_may_begin_a_character_is_text() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ab = tokenizer.token_to_id("ab")
        assert "".join(stream(tokenizer, [0xFF] * 50, [ab, ab])) == BROKEN * 3 + "abab"


def test_a_character_that_the_prompt_began_and_nothing_finishes_becomes_text() -> None:
    assert stream(byte_level(), ids_of("x€")[:-1], ids_of("ok")) == [BROKEN + "o", "k", ""]


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one() -> None:
    the, special = 257, 256 + 9
    for prompt in ([258], [258] + [special] * 100):
        assert "".join(stream(byte_fallback(), prompt, [the, the])) == " the the"
    assert "".join(stream(byte_fallback(), [], [the, the])) == "the the"


def test_bytes_that_contradict_released_text_lose_nothing() -> None:
    """`DecodeStream` raises here: decoded at once, the broken byte spoils the character that is out already."""
    tokenizer = byte_fallback()
    output = [*ids_of("€"), 0xFF, *ids_of("€"), tokenizer.token_to_id("b"), tokenizer.token_to_id("▁a")]
    theirs = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        for token in output:
            theirs.step(tokenizer, token)
    deltas = stream(tokenizer, [], output)
    assert deltas[:3] == ["", "", "€"]
    assert "".join(deltas) == "€" + BROKEN * 4 + "b a"


def test_text_goes_on_after_a_run_that_a_broken_byte_spoiled() -> None:
    tokenizer = byte_fallback()
    deltas = stream(tokenizer, [], [0xFF, *ids_of("😀" * 5), tokenizer.token_to_id("b"), tokenizer.token_to_id("▁a")])
    assert "".join(deltas[:20]).startswith(BROKEN * 9)
    assert "".join(deltas).replace("😀", BROKEN * 4) == BROKEN * 21 + "b a"


def test_a_prompt_that_ends_in_a_long_run_of_bytes_keeps_the_space_after_it() -> None:
    tokenizer = byte_fallback()
    the, b = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("b")
    for num_characters in range(4, 12):
        assert stream(tokenizer, [b, *ids_of("€" * num_characters)], [the]) == [" the", ""]


def test_errors_of_the_library_are_not_swallowed() -> None:
    with pytest.raises(TypeError):
        TokenDecoder(byte_level(), [], skip_special_tokens=True).append(-1)


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class CountingStream:
    """A `DecodeStream` that counts the tokens it decodes: in each step those since the last but one text."""

    def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
        self.stream = DecodeStream(ids, skip_special_tokens)
        self.num_context, self.num_pending = len(ids), 0

    def step(self, tokenizer: CountingTokenizer, ids: int | list[int]) -> str | None:
        self.num_pending += len(ids) if isinstance(ids, list) else 1
        tokenizer.num_decoded += self.num_context + self.num_pending
        text: str | None = self.stream.step(tokenizer.tokenizer, ids)
        if text is not None:
            self.num_context, self.num_pending = self.num_pending, 0
        return text


@pytest.mark.parametrize(
    ("tokenizer", "period"),
    [
        (byte_level(), ids_of("some text ")),
        (byte_level(), [0xFF]),
        (byte_level(), [0x82, 0xE2]),
        (byte_level(), [byte_level().token_to_id("<s>")]),
        (byte_level(), [9999]),
        (byte_fallback(), [0xFF]),
        (byte_fallback(), [0xFF] * 9 + ids_of("😀😀😀")),
    ],
    ids=["text", "broken", "begun", "special", "unknown", "broken fallback", "mended fallback"],
)
def test_time_is_linear(tokenizer: Tokenizer, period: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse.text.detokenizer.DecodeStream", CountingStream)
    output = (ids_of("a") + period * 3000)[:3000]
    counting = CountingTokenizer(tokenizer)
    stream(counting, ids_of("prompt "), output)  # type: ignore[arg-type]
    assert counting.num_decoded < 60 * len(output)


# --- stop strings -----------------------------------------------------------------------------------------------------


def cut_at_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


stop_sets = st.lists(st.text(alphabet="ab €\n", min_size=1, max_size=4), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(TOKENIZERS)), stops=stop_sets, include=st.booleans())
def test_streamed_text_ends_as_the_whole_text_does(
    data: st.DataObject, name: str, stops: tuple[str, ...], include: bool
) -> None:
    tokenizer = TOKENIZERS[name]()
    output = data.draw(outputs(tokenizer, valid=True))
    expected, expected_stop = cut_at_stop(whole_text(tokenizer, [], output, True), stops, include)
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True, stop=stops, include_stop=include)
    released = ""
    for end, token in enumerate(output, 1):
        delta = detokenizer.append(token)
        released += delta.text
        assert released == detokenizer.text
        assert expected.startswith(released)
        if delta.stop is not None:
            break
        if not include and BROKEN not in (known := tokenizer.decode(output[:end])):
            held = known[len(released) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    released += detokenizer.finish().text
    assert (released, detokenizer.stop) == (expected, expected_stop)
    assert detokenizer.text == expected


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(include: bool) -> None:
    detokenizer = IncrementalDetokenizer(
        byte_level(), [], skip_special_tokens=True, stop=("STOP",), include_stop=include
    )
    deltas = [detokenizer.append(token) for token in ids_of("aSTSTOP")]
    assert [delta.text for delta in deltas] == (list("aSTSTOP") if include else ["a", "", "", "ST", "", "", ""])
    assert [delta.stop for delta in deltas] == [None] * 6 + ["STOP"]
    assert detokenizer.finish().text == ""


def test_what_looked_like_a_stop_string_is_released_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), [], skip_special_tokens=True, stop=("STOP",))
    assert [detokenizer.append(token).text for token in ids_of("xSTO")] == ["x", "", "", ""]
    assert detokenizer.finish().text == "STO"
    assert detokenizer.text == "xSTO"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), ids_of("xab"), skip_special_tokens=True, stop=("ab", "bc"))
    assert [detokenizer.append(token).text for token in ids_of("cc")] == ["c", "c"]


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"), [(0, "", "ab"), (1, "", "ab"), (2, "ab", "ab"), (3, "ab", "ab"), (4, "abab", None)]
)
def test_stop_strings_within_min_tokens_are_text(min_tokens: int, text: str, stop: str | None) -> None:
    detokenizer = IncrementalDetokenizer(
        byte_level(), [], skip_special_tokens=True, stop=("ab",), min_tokens=min_tokens
    )
    for token in ids_of("abab"):
        if detokenizer.append(token).stop:
            break
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop) == (text, stop)


def test_several_ignored_stop_strings_in_one_token() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True, stop=("a",), min_tokens=1)
    assert detokenizer.append(tokenizer.token_to_id("aab")).text == "aab"
    assert detokenizer.append(ids_of("a")[0]).stop == "a"
    assert detokenizer.text == "aab"


def test_a_stop_string_may_be_completed_by_the_flush() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), [], skip_special_tokens=True, stop=("a" + BROKEN,))
    for token in [*ids_of("xa"), 0xE2]:
        detokenizer.append(token)
    assert (detokenizer.finish().stop, detokenizer.text) == ("a" + BROKEN, "x")


def test_the_front_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, transfuse.text.detokenizer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("before", [b"", b"ab", b"ab\xff\xff\xff\xff\xff"])
def test_a_text_that_stands_alone_has_nothing_of_an_unfinished_character(
    make: Callable[[], Tokenizer], num_bytes: int, before: bytes
) -> None:
    prompt = [*before, *"😀".encode()[:num_bytes]]
    decoder = TokenDecoder(make(), prompt, skip_special_tokens=True, stands_alone=True)
    text = [decoder.append(token) for token in b"{1}"]
    assert "".join(text) + decoder.flush() == "{1}"
