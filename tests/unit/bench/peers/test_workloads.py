from __future__ import annotations

import pytest

from transfuse.bench.peers.workloads import FIGURES, TOKEN_IDS, WORKLOADS, metrics, token_ids, workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_repeat_has_prompts_of_its_own_and_always_the_same(name: str) -> None:
    assert workload(name, 0) == workload(name, 0) != workload(name, 1)
    lengths = [[[len(prompt) for prompt in call.prompts] for call in workload(name, repeat)] for repeat in (0, 1)]
    assert lengths[0] == lengths[1]


def test_sizes_are_those_that_are_published() -> None:
    sizes = {
        name: [(len(call.prompts), max(map(len, call.prompts)), sum(call.max_tokens)) for call in workload(name, 0)]
        for name in WORKLOADS
    }
    w2 = sizes.pop("W2")
    assert sizes == {
        "W1": [(1, 128, 1), (1, 128, 128)],
        "W3": [(1, 2048, 1)],
        "W4": [(16, 1056, 512)],
        "W5": [(16, 128, 1024)],
    }
    assert w2[0][0] == 32
    (call,) = workload("W4", 3)
    assert len({tuple(prompt[:1024]) for prompt in call.prompts}) == 1
    assert len({tuple(prompt) for prompt in call.prompts}) == 16


@pytest.mark.parametrize("name", WORKLOADS)
def test_figures_are_rates_or_times_of_the_calls(name: str) -> None:
    calls = workload(name, 0)
    found = metrics(name, [1.0, 3.0][: len(calls)])
    assert tuple(found) == FIGURES[name]
    num_tokens = sum(calls[-1].max_tokens)
    expected = {
        "W1": {"ttft_ms": 1000.0, "decode_tps": 127 / 2.0},
        "W2": {"out_tps": num_tokens},
        "W3": {"prompt_tps": 2048},
        "W4": {"secs": 1.0},
        "W5": {"out_tps": 1024},
    }
    assert found == expected[name]


def test_ids_are_in_small_vocabularies_too() -> None:
    assert token_ids(10**6) == TOKEN_IDS
    assert token_ids(512) == (64, 512)
    (call,) = workload("W3", 0, (64, 80))
    assert {token for prompt in call.prompts for token in prompt} == set(range(64, 80))
