"""The workloads that every peer runs: fixed random prompts, fixed output lengths, and the figures taken from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

# Where the vocabulary has as many: ordinary words in the test models' own.
TOKEN_IDS = (100, 48900)

Prompt = list[int]


class Call(NamedTuple):
    """One batch of requests, sent at once: prompts as token ids, and how many tokens each generates."""

    prompts: list[Prompt]
    max_tokens: list[int]


class Source:
    """Where the random tokens of a repeat's prompts come from.

    Args:
        seed: the same prompts come of the same seed.
        token_ids: the first id, and the one after the last.
    """

    def __init__(self, seed: str, token_ids: tuple[int, int]) -> None:
        self._rng = random.Random(seed)
        self._token_ids = token_ids

    def prompt(self, length: int) -> Prompt:
        """Token ids drawn one by one."""
        return [self._rng.randrange(*self._token_ids) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Workload:
    """What a peer is asked for, and what is told of it.

    Attributes:
        name: `W1` and the like, or what a sweep varies.
        size: the point of a sweep; None of what is no sweep.
        calls: makes the calls of a repeat, one to be sent after the other.
        figures: makes the figures of the wall seconds of each call: milliseconds (`*_ms`), tokens/s (`*_tps`), seconds.
        figure_names: their names.
    """

    name: str
    size: int | None
    calls: Callable[[Source], list[Call]]
    figures: Callable[[Sequence[float]], dict[str, float]]
    figure_names: tuple[str, ...]


def _prompt_then_decode(name: str, size: int | None, num_requests: int, length: int, num_decoded: int) -> Workload:
    """Prompts alone, then others with answers: the first token belongs to the prompt's time, the rest to decoding."""

    def calls(source: Source) -> list[Call]:
        def prompts() -> list[Prompt]:
            return [source.prompt(length) for _ in range(num_requests)]

        return [Call(prompts(), [1] * num_requests), Call(prompts(), [1 + num_decoded] * num_requests)]

    def figures(seconds: Sequence[float]) -> dict[str, float]:
        decode_seconds = seconds[1] - seconds[0]
        return dict(ttft_ms=seconds[0] * 1e3, decode_tps=num_requests * num_decoded / decode_seconds)

    return Workload(name, size, calls, figures, ("ttft_ms", "decode_tps"))


def _rate(name: str, figure: str, num_tokens: int, calls: Callable[[Source], list[Call]]) -> Workload:
    """One call, told as so many tokens over its time."""
    return Workload(name, None, calls, lambda seconds: {figure: num_tokens / seconds[0]}, (figure,))


def _mixed_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of W2's 32 requests, the same in every repeat."""
    rng = random.Random(0)
    prompts = [rng.randint(16, 512) for _ in range(32)]
    return prompts, [rng.randint(64, 128) for _ in range(32)]


_W2_PROMPTS, _W2_OUTPUTS = _mixed_lengths()


def _shared_prefix(source: Source) -> list[Call]:
    prefix = source.prompt(1024)
    return [Call([prefix + source.prompt(32) for _ in range(16)], [32] * 16)]


_FIXED = (
    _prompt_then_decode("W1", None, 1, 128, 127),
    _rate("W2", "out_tps", sum(_W2_OUTPUTS), lambda source: [Call([*map(source.prompt, _W2_PROMPTS)], _W2_OUTPUTS)]),
    _rate("W3", "prompt_tps", 2048, lambda source: [Call([source.prompt(2048)], [1])]),
    Workload("W4", None, _shared_prefix, lambda seconds: {"secs": seconds[0]}, ("secs",)),
    _rate("W5", "out_tps", 16 * 64, lambda source: [Call([source.prompt(128) for _ in range(16)], [64] * 16)]),
)
# By name; docs/bench.md has them in a table.
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _FIXED})

# Points of what is varied, made of their size.
SWEEPS: Mapping[str, Callable[[int], Workload]] = MappingProxyType(
    {
        "context": lambda size: _prompt_then_decode("context", size, 1, size, 32),
        "batch": lambda size: _prompt_then_decode("batch", size, size, 128, 64),
    }
)


def find_workload(text: str) -> Workload:
    """A workload by its name, or a point of a sweep such as `context:2048`.

    Raises:
        ValueError: there is none of that name, or the size is no whole number above 0.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    name, _, size = text.partition(":")
    if name not in SWEEPS or not size.isdecimal() or int(size) == 0:
        sweeps = ", ".join(f"{name}:SIZE" for name in SWEEPS)
        raise ValueError(f"{text!r} is no workload; there are {', '.join(WORKLOADS)}, and {sweeps}")
    return SWEEPS[name](int(size))


def token_ids(vocab_size: int) -> tuple[int, int]:
    """The range of ids to draw prompts from, where the vocabulary may be small: the first, and one after the last."""
    first, last = TOKEN_IDS
    return min(first, vocab_size // 8), min(last, vocab_size)


def prompts_of(text: str, repeat: int, ids: tuple[int, int] = TOKEN_IDS) -> list[Call]:
    """The calls of one repeat; every repeat has its own prompts, so that no prefix cache carries over."""
    return find_workload(text).calls(Source(f"{text}-{repeat}", ids))
