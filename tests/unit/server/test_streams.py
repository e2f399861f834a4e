"""Several streams read as one, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from transfuse.server.streams import merge, unless_gone


async def count(to: int, closed: list[int] | None = None) -> AsyncGenerator[int, None]:
    try:
        for i in range(to):
            await asyncio.sleep(0)
            yield i
    finally:
        if closed is not None:
            closed.append(to)


async def fail_after(num: int) -> AsyncGenerator[int, None]:
    for i in range(num):
        yield i
    raise ValueError("this one fails")


class TestMerge:
    def test_everything_arrives_and_the_last_of_each_at_least(self) -> None:
        async def run() -> dict[int, list[int]]:
            seen: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
            async for index, item in merge([count(5), count(1), count(0), count(9)]):
                seen[index].append(item)
            return seen

        seen = asyncio.run(run())
        assert [items[-1:] for items in seen.values()] == [[4], [0], [], [8]]
        assert all(items == sorted(items) for items in seen.values())

    def test_a_pause_is_told_and_ends_nothing(self) -> None:
        async def run() -> list[tuple[int, int] | None]:
            going = asyncio.Event()

            async def halting() -> AsyncGenerator[int, None]:
                yield 1
                await going.wait()
                yield 2

            seen: list[tuple[int, int] | None] = []
            async for change in merge([halting()], pause=0.01):
                seen.append(change)
                if len(seen) == 3:
                    going.set()
            return seen

        assert asyncio.run(run()) == [(0, 1), None, None, (0, 2)]

    def test_a_slow_reader_misses_what_was_replaced(self) -> None:
        async def run() -> list[int]:
            seen = []
            async for _, item in merge([count(100)]):
                seen.append(item)
                await asyncio.sleep(0.02)
            return seen

        seen = asyncio.run(run())
        assert seen[-1] == 99
        assert len(seen) < 10

    def test_the_first_error_ends_all(self) -> None:
        closed: list[int] = []

        async def run() -> None:
            async for _ in merge([count(1000, closed), fail_after(2), count(2000, closed)]):
                pass

        with pytest.raises(ValueError, match="this one fails"):
            asyncio.run(run())
        assert sorted(closed) == [1000, 2000]

    def test_closing_closes_all_and_so_does_cancelling_whichever_task_reads(self) -> None:
        closed: list[int] = []

        async def run() -> None:
            stream = merge([count(1000, closed), count(2000, closed)])
            await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await stream.aclose()
            assert sorted(closed) == [1000, 2000]
            task = asyncio.create_task(anext(merge([count(3000, closed)])))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert 3000 in closed

        asyncio.run(run())


class TestUnlessGone:
    @staticmethod
    def request(leaves: asyncio.Event) -> Request:
        async def receive() -> dict[str, Any]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        return Request({"type": "http", "method": "GET", "path": "/", "headers": []}, receive)

    def test_the_result_or_the_error_of_the_work(self) -> None:
        async def work() -> int:
            return 5

        async def broken() -> int:
            raise ValueError("broken")

        async def run() -> None:
            request = self.request(asyncio.Event())
            assert await unless_gone(request, work()) == 5
            with pytest.raises(ValueError, match="broken"):
                await unless_gone(request, broken())

        asyncio.run(run())

    def test_work_is_cancelled_when_the_client_leaves_or_the_waiter_is(self) -> None:
        async def run() -> list[str]:
            ends = []

            async def work() -> None:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ends.append("cancelled")
                    raise

            leaves = asyncio.Event()
            waiting = asyncio.create_task(unless_gone(self.request(leaves), work()))
            await asyncio.sleep(0.01)
            leaves.set()
            with pytest.raises(ClientDisconnect):
                await waiting
            waiting = asyncio.create_task(unless_gone(self.request(asyncio.Event()), work()))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return ends

        assert asyncio.run(run()) == ["cancelled", "cancelled"]
