"""What a client is sent joins to what it would have been sent at once, however the answer grew."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.server.openai.fake_llm import EOS, TOKENIZER, VOCAB, FakeCore, logprobs_of
from transfuse.front.front import Front
from transfuse.messages import ModelLimits
from transfuse.outputs import CompletionOutput, RequestOutput
from transfuse.sampling_params import SamplingParams
from transfuse.server.deltas import Cursor, Delta, whole

TEXTS = ["hello", "wörld", "日本", "🙂", " he", "ll", "o\n", "é"]
PIECES = [TOKENIZER.encode(text, add_special_tokens=False) for text in TEXTS]


def run(tokens: list[int], params: SamplingParams, looks: list[bool]) -> tuple[RequestOutput, list[list[Delta]]]:
    """Plays tokens, looking at the answer after those steps that `looks` says, and at the end."""
    core = FakeCore(lambda _: tokens)
    front = Front(core, TOKENIZER, ModelLimits(max_model_len=10_000, vocab_size=VOCAB))
    output = front.submit(None, [1], params, arrival_time=0.0)
    cursors = [Cursor() for _ in output.outputs]
    deltas: list[list[Delta]] = [[] for _ in cursors]
    for step in range(10_000):
        if output.finished:
            break
        front.take(core.step())
        if output.finished or looks[step % len(looks)]:
            for completion, cursor, seen in zip(output.outputs, cursors, deltas, strict=True):
                if (delta := cursor.advance(completion)) is not None:
                    seen.append(delta)
    return output, deltas


# Whole characters, cut ones, and any bytes at all.
token_lists = st.lists(
    st.one_of(st.sampled_from(PIECES), st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=3)), max_size=12
).map(lambda parts: [token for part in parts for token in part] or [EOS])
stops = st.lists(
    st.one_of(st.sampled_from(TEXTS), st.text(max_size=4, min_size=1, alphabet="helo wörl日🙂")), max_size=4
)


@settings(max_examples=300, deadline=None)
@given(
    tokens=token_lists,
    stop=stops,
    include=st.booleans(),
    n=st.integers(1, 3),
    min_tokens=st.integers(0, 3),
    looks=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_deltas_join_to_the_whole(
    tokens: list[int], stop: list[str], include: bool, n: int, min_tokens: int, looks: list[bool]
) -> None:
    params = SamplingParams(
        n=n,
        max_tokens=len(tokens) + 3,
        min_tokens=min_tokens,
        stop=stop,
        include_stop_str_in_output=include,
        logprobs=1,
    )
    output, deltas = run(tokens, params, looks)
    for completion, seen in zip(output.outputs, deltas, strict=True):
        text = "".join(delta.text for delta in seen)
        assert text == completion.text == whole(completion).text
        assert [token for delta in seen for token in delta.token_ids] == completion.token_ids
        logprobs = [position for delta in seen for position in delta.logprobs or ()]
        assert logprobs == completion.logprobs
        assert [next(iter(position)) for position in logprobs] == completion.token_ids
        assert [delta.finish_reason for delta in seen[:-1]] == [None] * (len(seen) - 1)
        assert seen[-1].finish_reason == completion.finish_reason
        assert seen[-1].stop_reason == completion.stop_reason
        assert [delta.is_first for delta in seen] == [True] + [False] * (len(seen) - 1)
        if completion.stop_reason in stop and not include and min_tokens == 0:
            assert not any(each in text for each in stop)


@settings(max_examples=150, deadline=None)
@given(text=st.text(min_size=1, max_size=12), looks=st.lists(st.booleans(), min_size=1, max_size=5))
def test_characters_are_never_split(text: str, looks: list[bool]) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    output, deltas = run([*tokens, EOS], SamplingParams(max_tokens=200), looks)
    assert output.outputs[0].text == text
    assert "".join(delta.text for delta in deltas[0]) == text
    # A text without U+FFFD has none in any of its parts.
    assert all("\ufffd" not in delta.text for delta in deltas[0]) or "\ufffd" in text


def test_nothing_new_is_no_delta() -> None:
    completion = CompletionOutput(0)
    cursor = Cursor()
    assert cursor.advance(completion) is None
    completion.token_ids.append(5)
    assert cursor.advance(completion) is not None
    assert cursor.advance(completion) is None
    completion.finish_reason = "length"
    assert cursor.advance(completion) == Delta("", [], None, "length", None, False)
    assert cursor.advance(completion) is None


def test_tokens_that_are_no_text_yet_are_a_delta_of_their_own() -> None:
    cursor = Cursor()
    delta = cursor.advance(CompletionOutput(0, token_ids=[7], logprobs=[logprobs_of(7, 0)]))
    assert delta == Delta("", [7], [logprobs_of(7, 0)], None, None, True)
