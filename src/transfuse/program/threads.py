"""How many threads the next run gets: one fewer while another process wants a core."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds, not runs: a run is milliseconds for a token, and a good part of a second for a long prompt.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0625, 2.0


class ThreadCount:
    """Gives up a thread where threads lose their cores to others, and tries again after a while.

    Threads that work in lockstep are as slow as the one that shares its core, and each loses a time slice at another
    moment; `python -m benchmarks.busy_neighbours MODEL --neighbours 1` measures what that costs. How many compute
    changes no bit of the results.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock()  # with one thread less
        self._next_pause = _FIRST_PAUSE
        self._gives_up = False

    def choose(self, most: int) -> int:
        """For the next run, of at most this many."""
        self._gives_up = self._clock() < self._until
        return max(most - 1, 1) if self._gives_up else most

    def observe(self, num_lost_cores: int) -> None:
        """Take in how many threads lost their core for long, in the run that `choose` was asked for."""
        if self._gives_up:
            return
        if num_lost_cores:
            self._until = self._clock() + self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        else:
            self._next_pause = max(self._next_pause / 2, _FIRST_PAUSE)
