"""Hands out rows of the state cache; plain Python."""

from __future__ import annotations

import heapq


class StateRows:
    """Rows `0 .. num_rows - 1`, each free or held by one request.

    The lowest free row goes first: rows in use then mostly lie side by side, and are read where they lie.

    Args:
        num_rows: rows of the state tensors.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = list(range(num_rows))
        self._held: set[int] = set()

    @property
    def num_held(self) -> int:
        """Rows in use."""
        return len(self._held)

    @property
    def num_free(self) -> int:
        """Rows that nobody uses."""
        return len(self._free)

    def take(self) -> int:
        """A row for one request; what it holds is arbitrary."""
        assert self._free, f"all {self._num_rows} state rows are in use"
        row = heapq.heappop(self._free)
        self._held.add(row)
        return row

    def give_back(self, row: int) -> None:
        """Ends the use of a row."""
        assert row in self._held, f"state row {row} is given back and was not in use"
        self._held.remove(row)
        heapq.heappush(self._free, row)

    def check(self, held: list[int]) -> None:
        """Asserts that exactly these rows are in use, each once, and all others free."""
        assert sorted(held) == sorted(self._held), f"requests hold rows {held}, and {sorted(self._held)} are in use"
        assert sorted([*self._free, *self._held]) == list(range(self._num_rows)), "a state row leaked"
