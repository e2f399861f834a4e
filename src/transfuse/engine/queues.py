"""Keeps unfinished requests in order: those that wait, those that run, those to run alone."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from operator import attrgetter

from transfuse.engine.request import Request, RequestStatus

_rank = attrgetter("rank")
_Entry = tuple[tuple[int, int], int, Request]


class RequestQueues:
    """All unfinished requests by id and by `Request.rank`, and their status."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._waiting = _WaitingQueue()
        self._running: list[Request] = []
        self._isolated: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Those that run, by rank: the last is the first to give way."""
        return self._running

    def get(self, request_id: str) -> Request | None:
        """The request of this id."""
        return self._requests.get(request_id)

    def first_waiting(self) -> Request | None:
        """The waiting request of lowest rank."""
        return self._waiting.peek()

    def first_isolated(self) -> Request | None:
        """The request to run alone now: one that has begun, else the one of lowest rank."""
        return min(
            self._isolated.values(), key=lambda one: (one.status is not RequestStatus.RUNNING, one.rank), default=None
        )

    def add(self, request: Request) -> None:
        """Takes in a new request, which waits."""
        self._requests[request.request_id] = request
        self._wait(request)

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self._waiting.remove(request)
        insort(self._running, request, key=_rank)
        request.status = RequestStatus.RUNNING

    def requeue(self, request: Request) -> None:
        """A running request waits again, before all that came later."""
        self._leave_running(request)
        self._wait(request)

    def clear_isolation(self, request: Request) -> None:
        """A request runs with others again."""
        request.isolate = False
        self._isolated.pop(request.request_id, None)

    def remove(self, request: Request) -> None:
        """Lets go of a request that ends."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._leave_running(request)
        self._isolated.pop(request.request_id, None)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED

    def check(self) -> None:
        """Asserts that nothing is lost or out of order."""
        assert len(self._requests) == len(self._running) + len(self._waiting), "a request is lost"
        assert self._running == sorted(self._running, key=_rank), "running requests are out of order"
        assert set(self._isolated) == {one.request_id for one in self._requests.values() if one.isolate}

    def _wait(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting.push(request)
        if request.isolate:
            self._isolated[request.request_id] = request

    def _leave_running(self, request: Request) -> None:
        index = bisect_left(self._running, request.rank, key=_rank)
        assert self._running[index] is request, f"{request} is not running"
        del self._running[index]


class _WaitingQueue:
    """A heap by rank. Removal from the middle is lazy: abandoned entries are skipped, and swept when they are many."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._tick = count()  # a request may have an abandoned entry of equal rank

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request) -> None:
        entry = (request.rank, next(self._tick), request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2].request_id) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
