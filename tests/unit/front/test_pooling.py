from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest

from tests.zoo.tokenizer import tokenizer
from transfuse.errors import EngineError, RequestError
from transfuse.front.pooling import PoolingFront, Scoring
from transfuse.front.similarity import similarity
from transfuse.front.texts import ReadText, as_list, pair_up
from transfuse.messages import ModelLimits, NewPooling, Pooling, RequestUpdate
from transfuse.models.tokenizer import from_transformers


class Keeping:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.texts: dict[str, NewPooling] = {}
        self.aborted: list[str] = []

    def add_text(self, new: NewPooling) -> None:
        self.texts[new.request_id] = new

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


def _front(**pooling: object) -> tuple[PoolingFront, Keeping]:
    core = Keeping()
    settings = {"task": "embed", "dimension": 2, **pooling}
    limits = ModelLimits(max_model_len=20, vocab_size=512, pooling=Pooling(**settings))  # type: ignore[arg-type]
    return PoolingFront(core, from_transformers(tokenizer(), ()), limits), core


def _vector(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _pool(front: PoolingFront, texts: Sequence[ReadText], vectors: Sequence[bytes]) -> list:
    outputs = [front.submit(text, arrival_time=1.0) for text in texts]
    updates = [RequestUpdate(request_id=o.request_id, pooled=v) for o, v in zip(outputs, vectors, strict=True)]
    assert front.take(updates) == outputs
    return outputs


def test_updates_fill_the_answers_in() -> None:
    front, core = _front()
    output = front.submit(ReadText([5, 6], "x", [0, 1], 1), priority=3, arrival_time=1.0)
    (new,) = core.texts.values()
    assert (new.token_ids, new.type_ids, new.num_skipped, new.priority) == ([5, 6], [0, 1], 1, 3)
    assert (front.num_unfinished, output.finished) == (1, False)
    front.take([RequestUpdate(request_id=output.request_id, pooled=_vector(0.5, -2.0), finished_time=2.0)])
    assert (output.outputs.embedding, output.finished, front.num_unfinished) == ([0.5, -2.0], True, 0)
    assert front.take([RequestUpdate(request_id="unknown")]) == []


def test_aborted_and_lost_texts() -> None:
    front, core = _front()
    one, two, three = (front.submit(ReadText([5]), arrival_time=0.0) for _ in range(3))
    front.abort([one.request_id, "unknown"])
    assert core.aborted == [one.request_id]
    assert front.fail_all(EngineError("gone")) == [two, three]
    assert isinstance(three.error, EngineError)
    assert front.num_unfinished == 0


def test_vectors_are_compared_by_what_the_files_say() -> None:
    cases = {"cosine": 24 / 25, "dot": 24.0, "euclidean": -math.sqrt(2), "manhattan": -2.0}
    for name, expected in cases.items():
        assert similarity(name)(_vector(3.0, 4.0), _vector(4.0, 3.0)) == pytest.approx(expected)
    assert similarity("cosine")(_vector(0.0), _vector(0.0)) == 0.0
    with pytest.raises(RequestError, match="hamming"):
        similarity("hamming")


def test_each_text_is_embedded_once_with_its_prompt() -> None:
    front, _ = _front(prompts={"query": "q: ", "document": "d: "})
    scoring = Scoring(front.texts, ["a"], ["b", "cat"], [(0, 0), (0, 1)])
    assert [text.text for text in scoring.needed] == ["q: a", "d: b", "d: cat"]
    outputs = _pool(front, scoring.needed, [_vector(1.0, 0.0), _vector(0.0, 2.0), _vector(3.0, 0.0)])
    results = scoring.results(outputs)
    assert [result.outputs.score for result in results] == [0.0, 1.0]
    assert results[1].prompt_token_ids == outputs[0].prompt_token_ids + outputs[2].prompt_token_ids
    outputs[1].error = EngineError("failed")
    assert math.isnan(scoring.results(outputs)[0].outputs.score)


def test_a_classifier_reads_pairs() -> None:
    front, _ = _front(task="score", dimension=1)
    scoring = Scoring(front.texts, ["a", "b"], ["b", "cat"], [(0, 0), (1, 1)])
    assert len(scoring.needed) == 2
    results = scoring.results(_pool(front, scoring.needed, [_vector(0.25), _vector(0.5)]))
    assert [result.outputs.score for result in results] == [0.25, 0.5]


def test_pairs() -> None:
    assert pair_up(["a"], ["b", "c"]) == [(0, 0), (0, 1)]
    assert pair_up(["a", "b"], ["b", "c"]) == [(0, 0), (1, 1)]
    for queries in (["a", "b"], ["a", "b", "c", "d"]):
        with pytest.raises(RequestError, match="3 documents"):
            pair_up(queries, ["a", "b", "c"])
    assert as_list("query", "a") == ["a"]
    for wrong in ([], [1]):
        with pytest.raises(RequestError, match="query"):
            as_list("query", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(20, (8, 12)), (10, (5, 5)), (13, (7, 6)), (16, (8, 8)), (17, (8, 9))]
)
def test_the_longer_of_two_texts_is_cut_first(max_tokens: int, lengths: tuple[int, int]) -> None:
    made = from_transformers(tokenizer(), ())
    first, second = (made.encode(text, add_special_tokens=False) for text in ("ABCDEFGH", "IJKLMNOPQRSTUVWX"))
    ids, _ = made.encode_whole("ABCDEFGH", "IJKLMNOPQRSTUVWX", max_tokens=max_tokens)
    assert (len(first), len(second)) == (8, 16)
    assert ids == first[: lengths[0]] + second[: lengths[1]]
