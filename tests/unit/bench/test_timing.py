from __future__ import annotations

import pytest

from transfuse.bench.stats import Distribution
from transfuse.bench.timing import Timing, cached_share, duration, latencies, num_within, parse_goals, rates
from transfuse.errors import ConfigError


def timing(sent: float, chunks: list[float], ended: float, num_output: int, cached: int | None = 0) -> Timing:
    return Timing(sent, chunks, ended, num_prompt_tokens=10, num_output_tokens=num_output, num_cached_tokens=cached)


# Five tokens in three chunks.
ONE = timing(1.0, [1.5, 1.75, 2.5], 2.5, 5)


def test_the_measures_of_one_request() -> None:
    assert (ONE.ttft, ONE.e2e, ONE.tpot) == (0.5, 1.5, 0.25)
    assert ONE.gaps == [0.25, 0.75]


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert timing(0.0, [1.0], 1.0, 1).tpot is None
    assert latencies([timing(0.0, [1.0], 1.0, 1)])["tpot_ms"] is None


def test_latencies_are_over_all_requests_in_milliseconds() -> None:
    found = latencies([ONE, timing(0.0, [1.0, 1.1], 1.1, 2)])
    values = {name: (d.low, d.high, d.num) for name, d in found.items() if isinstance(d, Distribution)}
    assert values == {
        "ttft_ms": (500, 1000, 2),
        "tpot_ms": (pytest.approx(100), 250, 2),
        "itl_ms": (pytest.approx(100), 750, 3),
        "e2e_ms": (pytest.approx(1100), 1500, 2),
    }


def test_rates_are_over_the_whole_time() -> None:
    timings = [ONE, timing(3.0, [4.0], 5.0, 3)]
    assert duration(timings) == 4.0
    assert rates(timings, 4.0) == {"requests_per_s": 0.5, "output_tokens_per_s": 2.0, "total_tokens_per_s": 7.0}


def test_the_cached_share_is_known_only_if_it_is_of_every_request() -> None:
    assert cached_share([timing(0, [1], 1, 1, 5), timing(0, [1], 1, 1, 0)]) == 0.25
    assert cached_share([timing(0, [1], 1, 1, 5), timing(0, [1], 1, 1, None)]) is None
    assert cached_share([]) is None


def test_a_request_is_good_if_it_keeps_every_goal() -> None:
    goals = parse_goals("ttft:500, tpot:240")
    assert goals == {"ttft": 500, "tpot": 240}
    assert num_within([ONE], {"ttft": 500}) == 1
    assert num_within([ONE], {"ttft": 499}) == 0
    assert num_within([ONE], goals) == 0
    assert num_within([ONE], {"e2e": 1500, "tpot": 250}) == 1
    assert num_within([timing(0.0, [0.1], 0.1, 1)], {"tpot": 1}) == 1


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "ttft:0", "ttft:-5", "itl:5", "ttft:5,,tpot:3", "ttft:nan"])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft:500,tpot:50"):
        parse_goals(text)
