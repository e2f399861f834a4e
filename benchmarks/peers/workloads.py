"""The workloads that every peer runs: fixed random prompts, fixed output lengths, and the figures taken from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

TOKEN_IDS = (100, 48900)  # ordinary words in the vocabularies of all test models

Prompt = list[int]


class Call(NamedTuple):
    """One batch of requests, sent at once: prompts as token ids, and how many tokens each generates."""

    prompts: list[Prompt]
    max_tokens: list[int]


def random_prompt(rng: random.Random, length: int) -> Prompt:
    """Token ids drawn one by one from `rng`."""
    return [rng.randrange(*TOKEN_IDS) for _ in range(length)]


def _mixed_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of W2's 32 requests, the same in every repeat."""
    rng = random.Random(0)
    prompts = [rng.randint(16, 512) for _ in range(32)]
    return prompts, [rng.randint(64, 128) for _ in range(32)]


W1_NUM_DECODED = 127  # the first token belongs to the prompt's time
W2_PROMPT_LENGTHS, W2_OUTPUT_LENGTHS = _mixed_lengths()
W3_PROMPT_LENGTH = 2048
W5_NUM_REQUESTS, W5_PROMPT_LENGTH, W5_OUTPUT_LENGTH = 16, 128, 64


def single_stream(rng: random.Random) -> list[Call]:
    """W1: one request, 128 tokens in, 1 out and then (another prompt) 128 out."""
    return [Call([random_prompt(rng, 128)], [1]), Call([random_prompt(rng, 128)], [1 + W1_NUM_DECODED])]


def mixed_batch(rng: random.Random) -> list[Call]:
    """W2: 32 requests at once, prompts of 16..512 tokens, outputs of 64..128."""
    return [Call([random_prompt(rng, length) for length in W2_PROMPT_LENGTHS], W2_OUTPUT_LENGTHS)]


def long_prompt(rng: random.Random) -> list[Call]:
    """W3: one prompt of 2,048 tokens, 1 out."""
    return [Call([random_prompt(rng, W3_PROMPT_LENGTH)], [1])]


def shared_prefix(rng: random.Random) -> list[Call]:
    """W4: 16 requests at once that share 1,024 tokens and have 32 of their own, 32 out."""
    prefix = random_prompt(rng, 1024)
    return [Call([prefix + random_prompt(rng, 32) for _ in range(16)], [32] * 16)]


def small_batch(rng: random.Random) -> list[Call]:
    """W5: 16 requests at once, 128 tokens in, 64 out."""
    prompts = [random_prompt(rng, W5_PROMPT_LENGTH) for _ in range(W5_NUM_REQUESTS)]
    return [Call(prompts, [W5_OUTPUT_LENGTH] * W5_NUM_REQUESTS)]


WORKLOADS: dict[str, Callable[[random.Random], list[Call]]] = {
    "W1": single_stream,
    "W2": mixed_batch,
    "W3": long_prompt,
    "W4": shared_prefix,
    "W5": small_batch,
}

# Every figure that a workload may report, as the columns of a table: name and digits.
METRICS = {"ttft_ms": 1, "decode_tps": 1, "out_tps": 1, "prompt_tps": 1, "secs": 2}


def workload(name: str, repeat: int) -> list[Call]:
    """The calls of one repeat; every repeat has its own prompts, so that no prefix cache carries over."""
    return WORKLOADS[name](random.Random(f"{name}-{repeat}"))


def metrics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Figures from the wall time of each call: `ttft_ms`, rates in tokens/s (`*_tps`), `secs`."""
    if name == "W1":
        return dict(ttft_ms=seconds[0] * 1e3, decode_tps=W1_NUM_DECODED / (seconds[1] - seconds[0]))
    if name == "W2":
        return dict(out_tps=sum(W2_OUTPUT_LENGTHS) / seconds[0], secs=seconds[0])
    if name == "W3":
        return dict(prompt_tps=W3_PROMPT_LENGTH / seconds[0], secs=seconds[0])
    if name == "W4":
        return dict(secs=seconds[0])
    if name == "W5":
        return dict(out_tps=W5_NUM_REQUESTS * W5_OUTPUT_LENGTH / seconds[0], secs=seconds[0])
    raise KeyError(name)
