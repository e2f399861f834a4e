"""Lets in as many continuations as may run and wait, and tells the others when to come again."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager

from transfuse.errors import QueueFullError, RequestError

# How fast the estimate of a request's duration follows what is measured.
_WEIGHT_OF_LATEST = 0.1
_MAX_RETRY_AFTER = 60


class Admission:
    """Counts continuations under way; `n` of a prompt are `n`.

    Attributes:
        num_admitted: continuations that were let in and have not ended.

    Args:
        max_running: continuations that the engine computes at once.
        max_queued: continuations that may wait for that.
    """

    def __init__(self, max_running: int, max_queued: int) -> None:
        self._max_running = max_running
        self._max_admitted = max_running + max_queued
        self._seconds = 1.0  # of a request, smoothed
        self.num_admitted = 0

    @contextmanager
    def admit(self, num_continuations: int) -> Generator[None, None, None]:
        """Within it, the continuations of one request have their places.

        Raises:
            RequestError: they are more than there are places, so that waiting never helps.
            QueueFullError: too few places are free.
        """
        if num_continuations > self._max_admitted:
            raise RequestError(
                f"The request asks for {num_continuations} continuations, prompts times n; this server takes "
                f"{self._max_admitted} at once. Send fewer in one request, or raise --max-queued-requests."
            )
        if self.num_admitted + num_continuations > self._max_admitted:
            raise QueueFullError(
                f"The server is busy: {self.num_admitted} continuations run or wait, and its limit is "
                f"{self._max_admitted}. Try again later, or raise --max-queued-requests.",
                retry_after=self.retry_after(),
            )
        self.num_admitted += num_continuations
        started = time.monotonic()
        try:
            yield
        finally:
            self.num_admitted -= num_continuations
            self._seconds += _WEIGHT_OF_LATEST * (time.monotonic() - started - self._seconds)

    def retry_after(self) -> int:
        """Seconds until a place is probably free: recent requests took so long, and so many of them end meanwhile."""
        # A request waits and runs for `_seconds`, and in that time all that are in now leave, at an even rate.
        share_to_leave = min(1.0, self._max_running / max(1, self.num_admitted))
        return min(_MAX_RETRY_AFTER, max(1, math.ceil(self._seconds * share_to_leave)))
