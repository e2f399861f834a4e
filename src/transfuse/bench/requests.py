"""The requests that a benchmark sends: random token ids from a seed, or prompts from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfuse.bench.peers.workloads import Source, token_ids
from transfuse.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        prompt: as text, or as token ids.
        max_tokens: how many tokens it generates.
    """

    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers are.

    Attributes:
        input_len: tokens of a prompt.
        output_len: tokens of an answer.
        range_ratio: lengths are drawn evenly from `length · (1 ± range_ratio)`; 0: all are as they are given.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ConfigError(
                f"Prompts of {self.input_len} and answers of {self.output_len} tokens cannot be sent: both need at "
                "least 1. Check --input-len and --output-len."
            )
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(f"--random-range-ratio is {self.range_ratio}; expected a number from 0 to below 1.")


def random_requests(lengths: Lengths, count: int, vocab_size: int, seed: str) -> list[BenchRequest]:
    """Prompts of random ids that no other seed has, so that no prefix cache finds anything."""
    rng, source = random.Random(seed), Source(seed, token_ids(vocab_size))
    requests = []
    for _ in range(count):
        prompt = source.prompt(_drawn(rng, lengths.input_len, lengths.range_ratio))
        requests.append(BenchRequest(prompt, _drawn(rng, lengths.output_len, lengths.range_ratio)))
    return requests


def random_texts(lengths: Lengths, count: int, seed: str) -> list[BenchRequest]:
    """Prompts of as many random words, for servers that take text alone: a word is a token or two."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        num_words = _drawn(rng, lengths.input_len, lengths.range_ratio)
        prompt = " ".join(rng.choice(_WORDS) for _ in range(num_words))
        requests.append(BenchRequest(prompt, _drawn(rng, lengths.output_len, lengths.range_ratio)))
    return requests


def _drawn(rng: random.Random, length: int, ratio: float) -> int:
    low, high = round(length * (1 - ratio)), round(length * (1 + ratio))
    return max(1, rng.randint(low, high))


def read_requests(path: Path, output_len: int) -> list[BenchRequest]:
    """Prompts from a file: one a line, or in a `.jsonl` file objects with `prompt` and, if wanted, `max_tokens`.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompts in {path} cannot be read: {error}.") from error
    if not lines:
        raise ConfigError(f"{path} holds no prompt; write one a line.")
    if path.suffix != ".jsonl":
        return [BenchRequest(line, output_len) for line in lines]
    return [_from_json(line, f"{path}:{number}", output_len) for number, line in enumerate(lines, 1)]


def _from_json(line: str, where: str, output_len: int) -> BenchRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from error
    prompt: Any = fields.get("prompt") if isinstance(fields, dict) else None
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise ConfigError(f"{where} has no prompt; expected an object with `prompt`, a text or a list of token ids.")
    max_tokens = fields.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{where} has max_tokens {max_tokens!r}; expected an integer of at least 1.")
    return BenchRequest(prompt, max_tokens)


def first_of(requests: Sequence[BenchRequest], count: int | None) -> list[BenchRequest]:
    """As many of a file's requests as are wanted, from its start again where it has fewer."""
    if count is None:
        return list(requests)
    return [requests[index % len(requests)] for index in range(count)]


_WORDS = (
    *("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "family", "group"),
    *(
        "country",
        "problem",
        "hand",
        "part",
        "place",
        "case",
        "week",
        "company",
        "system",
        "program",
        "question",
        "work",
    ),
    *("number", "night", "point", "home", "water", "room", "area", "money", "story", "fact", "month", "lot", "right"),
    *("study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend"),
    *("power", "hour", "game", "line", "end", "member", "law", "car", "city", "name", "team", "minute", "idea", "body"),
)
