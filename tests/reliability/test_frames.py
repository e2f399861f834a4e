"""The private socket: whatever comes over it, the core goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from tests.unit.test_messages import mutations
from transfuse import AsyncLLM, SamplingParams
from transfuse.messages import Shutdown, encode

SENTINEL = {"prompt_token_ids": [90, 91, 92]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def hostile_frames(count: int) -> list[bytes]:
    """Half random bytes, half messages with bytes changed, cut off or doubled; none that asks for the end."""
    source, shutdown = random.Random(3), encode(Shutdown())
    frames = [source.randbytes(source.randrange(200)) for _ in range(count // 2)]
    frames += [b"", b"\x91" * 100_000, b"\x00" * 1_000_000]
    mutated = [frame for frame in mutations(seed=4, num_each=count // 2) if shutdown not in frame]
    return frames + source.sample(mutated, count - len(frames))


def test_no_frame_ends_the_core(llama: Path, scale: Callable[[int, int], int], figure: Callable[..., None]) -> None:
    count = scale(1000, 10_000)

    async def sentinel(llm: AsyncLLM) -> list[int]:
        async for answer in llm.generate(SENTINEL, PARAMS):
            last = answer
        assert last.finished and last.error is None
        return last.outputs[0].token_ids

    async def run() -> None:
        async with AsyncLLM(str(llama), dtype="float32", kv_cache_memory_bytes=2**24, show_progress=False) as llm:
            before, pid = await sentinel(llm), llm.core_pid
            for number, frame in enumerate(hostile_frames(count)):
                llm._client._connection._socket.send(frame)
                if number % 500 == 0:
                    assert await sentinel(llm) == before
            assert await sentinel(llm) == before
            assert llm.core_pid == pid, "it is still the same one"

    asyncio.run(run())
    figure(frames=count)
