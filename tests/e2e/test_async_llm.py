"""AsyncLLM on the tiny Llama: a process that serves, dies, freezes, and is served from again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.test_supervisor import state_of
from transfuse import LLM, AsyncLLM, SamplingParams
from transfuse.config import EngineConfig, WatchConfig, engine_config
from transfuse.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineUnavailableError,
    ModelNotFoundError,
    PromptError,
    RequestError,
)
from transfuse.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
PROMPTS = [[5, 6], [7] * 20, list(range(100, 140)), [10] * 3, [9]]
FAST = WatchConfig(tick_seconds=0.05, unresponsive_seconds=0.5, kill_seconds=1.0)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
Body = Callable[[AsyncLLM], Awaitable[None]]


def ids(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


async def complete(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **own: Any) -> RequestOutput:
    """The last answer to a prompt."""
    output = None
    async for output in llm.generate(prompt, params, **own):
        assert output.request_id
    assert output is not None and output.finished
    return output


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def until_idle(llm: AsyncLLM) -> None:
    """Until the core says that nothing runs and no block is in use."""
    await until(lambda: llm.stats.num_running == llm.stats.num_waiting == 0 and llm.stats.kv_cache_usage == 0.0)
    assert llm.num_unfinished == 0
    assert llm._changed == {}


@pytest.fixture(scope="module")
def temporary() -> Path:
    """Where sockets would be left."""
    return Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))


@pytest.fixture(scope="module")
def chatty_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "llama"
    shutil.copytree(llama, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def serve(
    chatty_llama: Path, settings: dict[str, Any], temporary: Path
) -> Callable[..., contextlib.AbstractAsyncContextManager[AsyncLLM]]:
    """Starts an engine for a test of its own, and sees that nothing is left of it."""

    @asynccontextmanager
    async def serving(**own: Any) -> AsyncIterator[AsyncLLM]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(temporary))
            async with AsyncLLM(chatty_llama, **({"kv_cache_memory_bytes": 2**24} | settings | own)) as llm:
                yield llm
                pid = llm.core_pid
        assert pid is None or state_of(pid) is None
        assert list(temporary.iterdir()) == []

    return serving


class Shared:
    """An engine that tests share, in a loop of its own thread."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._context = serve()
        self.llm: AsyncLLM = self._await(self._context.__aenter__())

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, 60), self._loop).result()

    def run(self, body: Body) -> None:
        """Run a test's body; afterwards nothing may be left running."""

        async def checked() -> None:
            await body(self.llm)
            await until_idle(self.llm)
            assert self.llm.state == "ready"

        self._await(checked())

    def close(self) -> None:
        self._await(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def shared(serve: Callable[..., Any]) -> Any:
    shared = Shared(serve)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def by_llm(llama: Path, settings: dict[str, Any]) -> list[RequestOutput]:
    """What LLM answers to `PROMPTS`."""
    with LLM(llama, **settings) as llm:
        return llm.generate([ids(p) for p in PROMPTS], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(by_llm: list[RequestOutput]) -> list[list[int]]:
    """Tokens that LLM gives for `PROMPTS`."""
    return [output.outputs[0].token_ids for output in by_llm]


def test_it_gives_what_llm_gives(shared: Shared, by_llm: list[RequestOutput]) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(complete(llm, ids(prompt)) for prompt in PROMPTS))
        assert [output.outputs for output in outputs] == [output.outputs for output in by_llm]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            metrics = output.metrics
            assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
            assert metrics.first_token_time <= metrics.finished_time <= time.monotonic()

    shared.run(body)


def test_it_tells_what_it_loaded(shared: Shared) -> None:
    llm = shared.llm
    assert (llm.state, llm.reason, llm.is_ready, llm.num_restarts) == ("ready", "", True, 0)
    assert (llm.summary["implementation"], llm.summary["dtype"]) == ("fused", "float32")
    assert (llm.limits.max_model_len, llm.limits.vocab_size) == (512, 512)
    assert llm.fusion_plan is not None
    assert llm.fusion_plan.num_fused_linears == llm.fusion_plan.num_linears > 0
    assert any(kind.source for kind in llm.fusion_plan.kinds)
    assert llm.core_pid != os.getpid()


def test_answers_grow_in_one_object(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        seen = [(output, len(output.outputs[0].token_ids)) async for output in llm.generate(ids([5, 6]), GREEDY)]
        counts = [count for _, count in seen]
        assert counts == sorted(set(counts))
        assert counts[-1] == 24
        assert all(output is seen[0][0] for output, _ in seen)

    shared.run(body)


def test_a_slow_reader_gets_all_at_its_own_pace(shared: Shared, expected: list[list[int]]) -> None:
    async def body(llm: AsyncLLM) -> None:
        num_seen = 0
        async for output in llm.generate(ids(PROMPTS[0]), GREEDY):
            num_seen += 1
            await until(lambda output=output: output.finished)
        assert num_seen == 2, "one in the middle, and the end"
        assert output.outputs[0].token_ids == expected[0]

    shared.run(body)


def test_many_at_once_are_not_mixed_up(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        prompts = [[3 + index, 200 - index, index % 5] for index in range(40)]
        alone = [await complete(llm, ids(prompt)) for prompt in prompts[:5]]
        together = await asyncio.gather(*(complete(llm, ids(prompt)) for prompt in prompts))
        assert [output.prompt_token_ids for output in together] == prompts
        for one, many in zip(alone, together, strict=False):
            assert one.outputs[0].token_ids == many.outputs[0].token_ids

    shared.run(body)


def test_continuations_stop_strings_and_logprobs(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        first, second = await asyncio.gather(*(complete(llm, ids([5, 6, 7]), params) for _ in range(2)))
        assert len({tuple(c.token_ids) for c in first.outputs}) > 1
        assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
        assert all(len(c.logprobs) == 8 for c in first.outputs)
        assert len(first.prompt_logprobs) == 3
        whole = (await complete(llm, ids([5, 6]))).outputs[0]
        stop = llm.tokenizer.decode(whole.token_ids[5:7])
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop)
        stopped = (await complete(llm, ids([5, 6]), params)).outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.text == whole.text[: whole.text.index(stop)]

    shared.run(body)


def test_texts_long_and_short(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        short, long = "hi", "a" * 3000
        output = await complete(llm, short)
        assert (output.prompt, output.prompt_token_ids) == (short, await llm.encode(short))
        with pytest.raises(CapacityError, match="tokens > 511"):
            await complete(llm, long)
        assert len(await llm.encode(long)) > 511
        with pytest.raises(PromptError):
            await complete(llm, "\ud800")

    shared.run(body)


def test_conversations(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "hello"}]
        text = await llm.render_chat(messages)
        assert text == "<user>hello<a>"
        assert await llm.render_chat(messages, add_generation_prompt=False) == "<user>hello"
        outputs = [output async for output in llm.chat(messages, GREEDY)]
        assert outputs[-1].prompt_token_ids == await llm.encode(text, add_special_tokens=False)
        answers = llm.chat(messages, LONG)
        await anext(answers)
        await answers.aclose()
        with pytest.raises(PromptError):
            await anext(llm.chat([{"content": "no role"}], chat_template_kwargs={"tools": 5}))

    shared.run(body)


@pytest.mark.parametrize(
    ("prompt", "own", "kind"),
    [
        (ids([]), {}, PromptError),
        (ids([512]), {}, PromptError),
        (5, {}, PromptError),
        (ids([1] * 512), {}, CapacityError),
        (ids([1]), {"sampling_params": {"n": 1}}, RequestError),
    ],
)
def test_what_can_never_be_served_raises(shared: Shared, prompt: Any, own: Any, kind: type[Exception]) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(kind):
            await anext(llm.generate(prompt, **own))

    shared.run(body)


def test_a_name_in_use_is_refused_and_its_owner_goes_on(shared: Shared, expected: list[list[int]]) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = llm.generate(ids(PROMPTS[0]), GREEDY, request_id="mine")
        output = await anext(first)
        assert output.request_id == "mine"
        with pytest.raises(RequestError, match="'mine' is in use"):
            await anext(llm.generate(ids([1]), GREEDY, request_id="mine"))
        assert output is [output async for output in first][-1]
        assert output.outputs[0].token_ids == expected[0]
        await complete(llm, ids([1]), request_id="mine")

    shared.run(body)


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_the_iterator_ends_the_request(shared: Shared, n: int) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=n, max_tokens=500, ignore_eos=True)
        answers = llm.generate(ids([1, 2]), params)
        output = await anext(answers)
        assert llm.num_unfinished == n
        await answers.aclose()
        assert {c.finish_reason for c in output.outputs} == {"abort"}
        await until_idle(llm)
        assert len(output.outputs[0].token_ids) < 100

    shared.run(body)


def test_cancelling_the_reader_ends_the_request_wherever_it_is(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        choose = random.Random(0)
        readers = [asyncio.create_task(complete(llm, ids([1, index]), LONG)) for index in range(100)]
        await asyncio.sleep(0)
        for reader in choose.sample(readers, len(readers)):
            await asyncio.sleep(choose.random() * 0.005)
            reader.cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 50
        await until_idle(llm)

    shared.run(body)


def test_salts_share_no_blocks(shared: Shared) -> None:
    async def body(llm: AsyncLLM) -> None:
        prompt = ids([random.Random(7).randrange(512) for _ in range(64)])
        salts = ("a", "a", "b", None, None)
        cached = [(await complete(llm, prompt, cache_salt=salt)).num_cached_tokens for salt in salts]
        assert cached == [0, 48, 0, 0, 48]

    shared.run(body)


def test_the_original_is_served_too(serve: Callable[..., Any], expected: list[list[int]]) -> None:
    async def body() -> None:
        async with serve(model_impl="original", kv_cache_memory_bytes=None) as llm:
            assert llm.summary["implementation"] == "original"
            assert llm.fusion_plan is None
            outputs = await asyncio.gather(*(complete(llm, ids(prompt)) for prompt in PROMPTS[:2]))
            assert [output.outputs[0].token_ids for output in outputs] == expected[:2]
            answers = llm.generate(ids([1]), LONG)
            await anext(answers)
            await answers.aclose()
            await until_idle(llm)

    asyncio.run(body())


def test_a_core_that_is_killed_is_replaced(serve: Callable[..., Any], expected: list[list[int]]) -> None:
    async def body() -> None:
        async with serve() as llm:
            pid = llm.core_pid
            readers = [asyncio.create_task(complete(llm, ids([1, index]), LONG)) for index in range(5)]
            await until(lambda: llm.stats.num_steps > 10)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            outputs = await asyncio.gather(*readers)
            assert time.monotonic() - killed_at < 2
            for output in outputs:
                assert isinstance(output.error, EngineDeadError)
                assert "SIGKILL" in str(output.error)
                assert output.outputs[0].finish_reason == "error"
            assert any(output.outputs[0].token_ids for output in outputs), "what was there is kept"
            assert (llm.state, llm.is_ready, llm.num_unfinished) == ("restarting", False, 0)
            with pytest.raises(EngineUnavailableError, match="restarting"):
                await anext(llm.generate("hi"))
            await until(lambda: llm.is_ready)
            assert llm.core_pid != pid
            assert llm.num_restarts == 1
            assert (await complete(llm, ids(PROMPTS[0]))).outputs[0].token_ids == expected[0]
            await until_idle(llm)

    asyncio.run(body())


def test_a_core_that_is_stopped_is_unresponsive_and_replaced(
    serve: Callable[..., Any], expected: list[list[int]]
) -> None:
    async def body() -> None:
        async with serve(watch=FAST) as llm:
            pid = llm.core_pid
            reader = asyncio.create_task(complete(llm, ids([1]), LONG))
            await until(lambda: llm.stats.num_steps > 3)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: llm.state == "unresponsive")
            with pytest.raises(EngineUnavailableError, match="unresponsive"):
                await anext(llm.generate("hi"))
            output = await reader
            assert isinstance(output.error, EngineDeadError)
            assert "no progress" in str(output.error)
            await until(lambda: llm.is_ready)
            assert state_of(pid) is None
            assert (await complete(llm, ids(PROMPTS[0]))).outputs[0].token_ids == expected[0]

    asyncio.run(body())


def test_the_third_crash_is_the_last(serve: Callable[..., Any]) -> None:
    async def body() -> None:
        async with serve() as llm:
            for _ in range(3):
                await until(lambda: llm.is_ready)
                os.kill(llm.core_pid, signal.SIGKILL)
                await until(lambda: not llm.is_ready)
            await until(lambda: llm.state == "failed")
            assert "3 times within 60 seconds" in llm.reason
            with pytest.raises(EngineUnavailableError, match="Start the program again"):
                await anext(llm.generate("hi"))

    asyncio.run(body())


def test_closing_ends_what_runs_and_refuses_the_rest(serve: Callable[..., Any]) -> None:
    async def body() -> None:
        async with serve() as llm:
            reader = asyncio.create_task(complete(llm, ids([1]), LONG))
            await until(lambda: llm.stats.num_steps > 3)
            await llm.close()
            await llm.close()
            assert isinstance((await reader).error, EngineClosedError)
            assert (llm.state, llm.core_pid) == ("closed", None)
            with pytest.raises(EngineClosedError):
                await anext(llm.generate("hi"))

    asyncio.run(body())


@pytest.mark.parametrize(
    ("model", "settings", "kind"),
    [
        ("/no/such/folder", {}, ModelNotFoundError),
        (None, {"max_model_len": 10**6}, ConfigError),
    ],
)
def test_what_cannot_be_loaded_raises(llama: Path, model: str | None, settings: dict[str, Any], kind: Any) -> None:
    async def body() -> None:
        llm = AsyncLLM(model or llama, show_progress=False, **settings)
        with pytest.raises(kind):
            await llm.start()
        assert llm.state == "closed"

    asyncio.run(body())


def test_a_wrong_setting_raises_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        AsyncLLM("m", max_num_seqs=0)
    with pytest.raises(TypeError, match="seed: give settings or an EngineConfig"):
        AsyncLLM(engine_config("m"), seed=1)
    assert isinstance(AsyncLLM(engine_config("m", seed=1))._config, EngineConfig)


def test_it_has_to_be_started() -> None:
    llm = AsyncLLM("m")
    assert (llm.state, llm.core_pid, llm.num_unfinished) == ("loading", None, 0)
    with pytest.raises(EngineUnavailableError, match="start"):
        _ = llm.tokenizer

    async def body() -> None:
        with pytest.raises(EngineUnavailableError, match="loading"):
            await anext(llm.generate("hi"))
        await llm.close()

    asyncio.run(body())


FRONT = """
import asyncio, sys
from transfuse import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(sys.argv[1], show_progress=False, dtype="float32", cache_dir=sys.argv[2]) as llm:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        async for _ in llm.generate({"prompt_token_ids": [1]}, params):
            break
        print(llm.core_pid, *sorted({"torch", "transformers"} & set(sys.modules)), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_front_that_is_killed_takes_its_core_with_it(chatty_llama: Path, verdicts: Path) -> None:
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    environment = os.environ | {"TMPDIR": folder}
    command = [sys.executable, "-c", FRONT, str(chatty_llama), str(verdicts)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as front:
        (pid,) = map(int, front.stdout.readline().split())  # and no module that the front must not load
        assert state_of(pid) is not None
        front.kill()
        front.wait(10)
    deadline = time.monotonic() + 1
    while state_of(pid) not in (None, "Z"):
        assert time.monotonic() < deadline, "the core is still there"
        time.sleep(0.01)
    assert os.listdir(folder) == []
