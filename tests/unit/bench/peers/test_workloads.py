from __future__ import annotations

import pytest

from transfuse.bench.peers.workloads import TOKEN_IDS, WORKLOADS, find_workload, prompts_of, token_ids

NAMES = [*WORKLOADS, "context:300", "batch:3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_has_prompts_of_its_own_and_always_the_same(name: str) -> None:
    assert prompts_of(name, 0) == prompts_of(name, 0) != prompts_of(name, 1)
    lengths = [[[len(prompt) for prompt in call.prompts] for call in prompts_of(name, repeat)] for repeat in (0, 1)]
    assert lengths[0] == lengths[1]


def test_sizes_are_those_that_are_published() -> None:
    sizes = {
        name: [(len(call.prompts), max(map(len, call.prompts)), sum(call.max_tokens)) for call in prompts_of(name, 0)]
        for name in NAMES
    }
    w2 = sizes.pop("W2")
    assert sizes == {
        "W1": [(1, 128, 1), (1, 128, 128)],
        "W3": [(1, 2048, 1)],
        "W4": [(16, 1056, 512)],
        "W5": [(16, 128, 1024)],
        "context:300": [(1, 300, 1), (1, 300, 33)],
        "batch:3": [(3, 128, 3), (3, 128, 3 * 65)],
    }
    assert w2[0][0] == 32
    (call,) = prompts_of("W4", 3)
    assert len({tuple(prompt[:1024]) for prompt in call.prompts}) == 1
    assert len({tuple(prompt) for prompt in call.prompts}) == 16


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_rates_or_times_of_the_calls(name: str) -> None:
    calls, workload = prompts_of(name, 0), find_workload(name)
    found = workload.figures([1.0, 3.0][: len(calls)])
    assert tuple(found) == workload.figure_names
    num_tokens = sum(calls[-1].max_tokens)
    expected = {
        "W1": {"ttft_ms": 1000.0, "decode_tps": 127 / 2.0},
        "W2": {"out_tps": num_tokens},
        "W3": {"prompt_tps": 2048},
        "W4": {"secs": 1.0},
        "W5": {"out_tps": 1024},
        "context:300": {"ttft_ms": 1000.0, "decode_tps": 32 / 2.0},
        "batch:3": {"ttft_ms": 1000.0, "decode_tps": 3 * 64 / 2.0},
    }
    assert found == expected[name]


@pytest.mark.parametrize("text", ["W9", "", "context", "context:", "context:0", "context:-1", "batch:many", "W1:2"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no workload; there are W1, .* context:SIZE, batch:SIZE"):
        find_workload(text)


def test_ids_are_in_small_vocabularies_too() -> None:
    assert token_ids(10**6) == TOKEN_IDS
    assert token_ids(512) == (64, 512)
    (call,) = prompts_of("W3", 0, (64, 80))
    assert {token for prompt in call.prompts for token in prompt} == set(range(64, 80))
