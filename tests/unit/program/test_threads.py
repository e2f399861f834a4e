from __future__ import annotations

from itertools import pairwise

from transfuse.program.threads import ThreadCount


def counts(lost: list[int], most: int = 4, seconds: float = 1 / 128) -> list[int]:
    """Threads of each run of so many seconds, of which in the i-th `lost[i]` lose their cores if it has all of them."""
    now = 0.0
    threads, found = ThreadCount(lambda: now), []
    for number in lost:
        found.append(threads.choose(most))
        now += seconds
        threads.observe(number if found[-1] == most else 0)
    return found


def test_undisturbed_runs_have_all_threads() -> None:
    assert counts([0] * 20) == [4] * 20


def test_a_disturbed_run_is_followed_by_some_with_one_less_and_then_a_try() -> None:
    assert counts([1] + [0] * 10) == [4] + [3] * 8 + [4, 4]


def test_tries_become_rare_while_the_neighbour_stays() -> None:
    found = counts([1] * 2000)
    assert found.count(4) < 20
    tries = [index for index, number in enumerate(found) if number == 4]
    assert [b - a for a, b in pairwise(tries)][:5] == [9, 17, 33, 65, 129]


def test_long_runs_have_all_threads_again_as_soon_as_short_ones() -> None:
    assert counts([1] * 5 + [0] * 4, seconds=0.5) == [4, 3, 4, 3, 4, 3, 4, 4, 4]


def test_one_thread_is_the_least() -> None:
    assert counts([1] * 20, most=1) == [1] * 20
