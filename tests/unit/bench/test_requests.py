from __future__ import annotations

from pathlib import Path

import pytest

from transfuse.bench.requests import (
    BenchRequest,
    Lengths,
    first_of,
    random_requests,
    random_texts,
    read_requests,
)
from transfuse.errors import ConfigError


def test_random_prompts_are_of_the_seed_alone() -> None:
    lengths = Lengths(50, 8)
    first, again, other = (random_requests(lengths, 3, 512, seed) for seed in ("a", "a", "b"))
    assert first == again != other
    assert {len(request.prompt) for request in first} == {50}
    assert {request.max_tokens for request in first} == {8}


@pytest.mark.parametrize("vocab_size", [16, 512, 50_000])
def test_random_ids_are_in_the_vocabulary_and_vary(vocab_size: int) -> None:
    requests = random_requests(Lengths(400, 1), 2, vocab_size, "seed")
    ids = {token for request in requests for token in request.prompt}
    assert min(ids) > 0 and max(ids) < vocab_size
    assert len(ids) > min(vocab_size, 400) // 2
    assert requests[0].prompt != requests[1].prompt


def test_lengths_are_drawn_from_their_range() -> None:
    requests = random_requests(Lengths(100, 10, 0.5), 300, 512, "seed")
    inputs, outputs = {len(r.prompt) for r in requests}, {r.max_tokens for r in requests}
    assert (min(inputs), max(inputs)) == (50, 150)
    assert outputs == set(range(5, 16))


def test_random_texts_have_as_many_words() -> None:
    (request,) = random_texts(Lengths(20, 4), 1, "seed")
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 20


@pytest.mark.parametrize("bad", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, 1.0), (1, 1, -0.1)])
def test_lengths_that_cannot_be_are_refused(bad: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError):
        Lengths(*bad)


def test_prompts_are_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One\n\nTwo three\n")
    assert read_requests(file, 7) == [BenchRequest("One", 7), BenchRequest("Two three", 7)]


def test_prompts_are_objects_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One", "max_tokens": 3}\n{"prompt": [4, 5]}\n')
    assert read_requests(file, 7) == [BenchRequest("One", 3), BenchRequest([4, 5], 7)]


@pytest.mark.parametrize(
    "line",
    ["x", "[]", "{}", '{"prompt": ""}', '{"prompt": []}', '{"prompt": [true]}', '{"prompt": "x", "max_tokens": 0}'],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "ok"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2 "):
        read_requests(file, 7)


def test_a_missing_or_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "no.txt", 7)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_requests(tmp_path / "empty.txt", 7)


def test_a_short_file_is_gone_through_again() -> None:
    requests = [BenchRequest("a", 1), BenchRequest("b", 1)]
    assert [r.prompt for r in first_of(requests, 3)] == ["a", "b", "a"]
    assert [r.prompt for r in first_of(requests, 1)] == ["a"]
    assert first_of(requests, None) == requests
