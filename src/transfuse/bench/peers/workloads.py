"""The workloads that every peer runs: fixed random prompts, fixed output lengths, and the figures taken from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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


def _mixed_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of W2's 32 requests, the same in every repeat."""
    rng = random.Random(0)
    prompts = [rng.randint(16, 512) for _ in range(32)]
    return prompts, [rng.randint(64, 128) for _ in range(32)]


W1_NUM_DECODED = 127  # the first token belongs to the prompt's time
W2_PROMPT_LENGTHS, W2_OUTPUT_LENGTHS = _mixed_lengths()
W3_PROMPT_LENGTH = 2048
W5_NUM_REQUESTS, W5_PROMPT_LENGTH, W5_OUTPUT_LENGTH = 16, 128, 64


def single_stream(source: Source) -> list[Call]:
    """W1: one request, 128 tokens in, 1 out and then (another prompt) 128 out."""
    return [Call([source.prompt(128)], [1]), Call([source.prompt(128)], [1 + W1_NUM_DECODED])]


def mixed_batch(source: Source) -> list[Call]:
    """W2: 32 requests at once, prompts of 16..512 tokens, outputs of 64..128."""
    return [Call([source.prompt(length) for length in W2_PROMPT_LENGTHS], W2_OUTPUT_LENGTHS)]


def long_prompt(source: Source) -> list[Call]:
    """W3: one prompt of 2,048 tokens, 1 out."""
    return [Call([source.prompt(W3_PROMPT_LENGTH)], [1])]


def shared_prefix(source: Source) -> list[Call]:
    """W4: 16 requests at once that share 1,024 tokens and have 32 of their own, 32 out."""
    prefix = source.prompt(1024)
    return [Call([prefix + source.prompt(32) for _ in range(16)], [32] * 16)]


def small_batch(source: Source) -> list[Call]:
    """W5: 16 requests at once, 128 tokens in, 64 out."""
    prompts = [source.prompt(W5_PROMPT_LENGTH) for _ in range(W5_NUM_REQUESTS)]
    return [Call(prompts, [W5_OUTPUT_LENGTH] * W5_NUM_REQUESTS)]


WORKLOADS: dict[str, Callable[[Source], list[Call]]] = {
    "W1": single_stream,
    "W2": mixed_batch,
    "W3": long_prompt,
    "W4": shared_prefix,
    "W5": small_batch,
}

# What each workload reports.
FIGURES: dict[str, tuple[str, ...]] = {
    "W1": ("ttft_ms", "decode_tps"),
    "W2": ("out_tps",),
    "W3": ("prompt_tps",),
    "W4": ("secs",),
    "W5": ("out_tps",),
}


def token_ids(vocab_size: int) -> tuple[int, int]:
    """The range of ids to draw prompts from, where the vocabulary may be small: the first, and one after the last."""
    first, last = TOKEN_IDS
    return min(first, vocab_size // 8), min(last, vocab_size)


def workload(name: str, repeat: int, ids: tuple[int, int] = TOKEN_IDS) -> list[Call]:
    """The calls of one repeat; every repeat has its own prompts, so that no prefix cache carries over."""
    return WORKLOADS[name](Source(f"{name}-{repeat}", ids))


def metrics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The workload's `FIGURES` from the wall time of each call: milliseconds, tokens/s (`*_tps`), seconds."""
    if name == "W1":
        return dict(ttft_ms=seconds[0] * 1e3, decode_tps=W1_NUM_DECODED / (seconds[1] - seconds[0]))
    if name == "W2":
        return dict(out_tps=sum(W2_OUTPUT_LENGTHS) / seconds[0])
    if name == "W3":
        return dict(prompt_tps=W3_PROMPT_LENGTH / seconds[0])
    if name == "W4":
        return dict(secs=seconds[0])
    if name == "W5":
        return dict(out_tps=W5_NUM_REQUESTS * W5_OUTPUT_LENGTH / seconds[0])
    raise KeyError(name)
