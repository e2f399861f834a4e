"""Many callers at once: nobody is lost, nobody gets another's text, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import openai
import pytest

from tests.reliability.serving import Served
from transfuse import LLM, SamplingParams

NUM_TOKENS = 12


def prompts_with_canaries(count: int) -> list[list[int]]:
    """Token ids, each prompt with numbers of its own at both ends; half of them share a long prefix."""
    source = random.Random(7)
    shared = [source.randrange(80, 500) for _ in range(40)]
    prompts = []
    for index in range(count):
        canary = [80 + index % 400, 80 + index // 400 % 400]
        middle = shared if index % 2 else [source.randrange(80, 500) for _ in range(source.randrange(30))]
        prompts.append([*canary, *middle, *canary])
    return prompts


def expected_texts(model: Path, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What each prompt gives in an engine without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model, dtype="float32", kv_cache_memory_bytes=2**24, show_progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]


async def stream_text(client: openai.AsyncOpenAI, model: str, prompt: Sequence[int]) -> str:
    stream = await client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


def test_nobody_is_lost_or_gets_anothers_text(
    served: Served, llama: Path, scale: Callable[[int, int], int], figure: Callable[..., None]
) -> None:
    count = scale(300, 2000)
    prompts = prompts_with_canaries(count)
    expected = expected_texts(llama, prompts)
    assert len(set(expected)) > count // 2, "texts that are alike would hide a mix-up"
    received: dict[int, str] = {}

    async def worker(client: openai.AsyncOpenAI, indices: Sequence[int]) -> None:
        for index in indices:
            received[index] = await stream_text(client, llama.name, prompts[index])

    async def run() -> None:
        async with served.async_client() as client:
            await asyncio.gather(*(worker(client, range(start, count, 64)) for start in range(64)))

    asyncio.run(run())
    mixed = [index for index in range(count) if received.get(index) != expected[index]]
    figure(requests=count, streams=64, lost=count - len(received), mixed=len(mixed))
    assert mixed == []
    served.wait_idle()


def test_each_gets_an_answer_or_is_told_to_come_back(llama: Path, figure: Callable[..., None]) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        try:
            await client.completions.create(
                model=llama.name, prompt=[90, 91], max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            return "429"
        return "200"

    async def run(server: Served) -> Counter[str]:
        async with server.async_client(timeout=120) as client:
            return Counter(await asyncio.gather(*(one(client) for _ in range(256))))

    with Served(
        llama, "--dtype", "float32", "--max-num-seqs", "8", "--max-queued-requests", "64", "--no-enable-prefix-caching"
    ) as server:
        outcomes = asyncio.run(run(server))
        figure(**{f"status_{status}": count for status, count in outcomes.items()})
        assert sum(outcomes.values()) == 256
        assert outcomes["200"] >= 72
        assert outcomes["429"] >= 1
        server.wait_idle()
        assert asyncio.run(run(server))["200"] >= 72, "it goes on as before"


def test_who_leaves_takes_everything_along(
    served: Served, llama: Path, scale: Callable[[int, int], int], figure: Callable[..., None]
) -> None:
    count = scale(100, 500)
    source = random.Random(3)
    left = Counter[str]()

    async def leave_early(client: openai.AsyncOpenAI, index: int) -> None:
        streaming = index % 2 == 0
        call = client.completions.create(
            model=llama.name,
            prompt=[80 + index % 400, 90] * source.randrange(1, 60),
            max_tokens=380,
            n=source.choice([1, 1, 3]),
            temperature=1.0,
            stream=streaming,
            extra_body={"ignore_eos": True},
        )

        async def read() -> None:
            answer = await call
            if streaming:
                async for _ in answer:
                    pass

        task = asyncio.create_task(read())
        done, _ = await asyncio.wait([task], timeout=source.random() * 0.6)
        left["in time" if done else "early"] += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run() -> None:
        async with served.async_client(timeout=60) as client:
            for start in range(0, count, 25):
                await asyncio.gather(*(leave_early(client, i) for i in range(start, min(start + 25, count))))

    asyncio.run(run())
    seconds = served.wait_idle(2.0)
    figure(left_early=left["early"], finished=left["in time"], seconds_until_idle=round(seconds, 2))
    assert left["early"] > count // 2


@pytest.mark.parametrize("route", ["completions"])
def test_nothing_grows(
    served: Served, llama: Path, route: str, scale: Callable[[int, int], int], figure: Callable[..., None]
) -> None:
    """Memory and descriptors of both processes over many requests, after the first have filled what is kept."""
    count, warm = scale(1500, 10_000), scale(500, 2000)
    source = random.Random(11)
    processes = {"front": served.process, "core": served.core()}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in processes}

    async def one(client: openai.AsyncOpenAI) -> None:
        prompt = [source.randrange(80, 500) for _ in range(source.randrange(4, 40))]
        if source.random() < 0.5:
            await stream_text(client, llama.name, prompt)
        else:
            await client.completions.create(
                model=llama.name, prompt=prompt, max_tokens=NUM_TOKENS, logprobs=1, extra_body={"ignore_eos": True}
            )

    async def run(number: int) -> None:
        async with served.async_client() as client:
            for start in range(0, number, 50):
                await asyncio.gather(*(one(client) for _ in range(50)))
                for name, process in processes.items():
                    samples[name].append((start, process.memory_info().rss))

    asyncio.run(run(warm))
    served.wait_idle()
    samples = {name: [] for name in processes}
    descriptors = {name: process.num_fds() for name, process in processes.items()}
    asyncio.run(run(count))
    served.wait_idle()
    for name, process in processes.items():
        slope = statistics.linear_regression(*zip(*samples[name], strict=True)).slope
        figure(**{f"{name}_bytes_per_request": round(slope), "requests": count})
        # Fewer requests show the slope less clearly: the allocator takes memory in steps.
        assert slope < scale(4096, 1024), f"the {name} grows by {slope:.0f} bytes a request"
        assert process.num_fds() <= descriptors[name] + 2, name
