"""Hostile templates and conversations next to ordinary ones, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.unit.text.chat_templates import CHATML, DUMP
from transfuse.errors import EngineClosedError, EngineError, PromptError
from transfuse.text.bounded_templates import BoundedTemplates
from transfuse.text.chat_template import ChatTemplates

T = TypeVar("T")
UNLIMITED = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
USER = {"role": "user", "content": "Hi"}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Takes long enough to be caught at it, and comes to an end.
SLOW = "{% for i in range(1500) %}{% for j in range(1000) %}{% endfor %}{% endfor %}done"
HOSTILE = {
    "nested loops": (FOREVER, "longer than 1 s"),
    "string doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "more than 256 MiB",
    ),
    "attribute escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "1 GB string": ("{{ 'x' * 10**9 }}", "more than 256 MiB"),
    "long text": ("{{ 'x' * 5000000 }}", "more than 4194304 characters"),
    "recursive macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "huge range": ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
    "huge width": ("{{ '%1000000000d' % 1 }}", "more than 256 MiB"),
    "huge power": ("{{ 7 ** (10**9) }}", "longer than 1 s|more than 256 MiB"),
    "padding filter": ("{{ 'a' | center(10**10) }}", "more than 256 MiB"),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "lists of lists": ("{% set x = [1] * 10**8 %}{{ x | tojson }}", "more than 256 MiB"),
}


def use(action: Callable[[BoundedTemplates], Awaitable[T]], template: str = CHATML, **limits: Any) -> T:
    """Runs `action` in an event loop, with a guard against hanging, and asserts that nothing is left behind."""

    async def main() -> T:
        templates = BoundedTemplates({"default": template}, SPECIALS, **limits)
        try:
            async with asyncio.timeout(60):
                return await action(templates)
        finally:
            await templates.close()

    try:
        return asyncio.run(main())
    finally:
        assert workers() == []


def workers() -> list[psutil.Process]:
    """Processes that have started and render, or wait for it."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "transfuse.text.template_worker" in process.cmdline() and process.rlimit(psutil.RLIMIT_AS) != UNLIMITED:
                found.append(process)
    return found


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [{"maximum": 10**30, "t": float("nan")}], "extra": {"k": [None, True, 1.5]}, "pad_token": "<p>"},
        {"chat_template": "{{ bos_token }}{{ messages[0].content }}"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_the_text_is_that_of_chat_templates(options: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "\ud800é🎉", "name": None, "x": object()}]
    expected = ChatTemplates({"default": DUMP}, SPECIALS).render(messages, **options)

    assert use(lambda templates: templates.render(messages, **options), DUMP) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_and_others_go_on(name: str) -> None:
    source, match = HOSTILE[name]

    async def action(templates: BoundedTemplates) -> None:
        hostile = asyncio.create_task(templates.render([USER], chat_template=source))
        others = [asyncio.create_task(templates.render([USER])) for _ in range(20)]
        ticks = 0
        while not hostile.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks > 0
        with pytest.raises(PromptError, match=match):
            await hostile
        expected = ChatTemplates({"default": CHATML}, SPECIALS).render([USER])
        assert await asyncio.gather(*others) == [expected] * 20

    use(action, seconds=1.0)


def test_others_do_not_wait_for_one_that_takes_long() -> None:
    async def action(templates: BoundedTemplates) -> None:
        hostile = asyncio.create_task(templates.render([USER], chat_template=FOREVER))
        await until(workers)
        for _ in range(20):
            await templates.render([USER])
        assert not hostile.done()
        hostile.cancel()

    use(action, seconds=60)


def test_ordinary_traffic_takes_one_process() -> None:
    async def action(templates: BoundedTemplates) -> int:
        for _ in range(5):
            await asyncio.gather(*[templates.render([USER]) for _ in range(10)])
        return len(workers())

    assert use(action) == 1


def test_hostile_messages() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]

    async def action(templates: BoundedTemplates) -> None:
        for content in (deep, 10**5000):
            with pytest.raises(PromptError, match=r"cannot be given|RecursionError"):
                await templates.render([{"role": "user", "content": content}])
        with pytest.raises(PromptError, match="more than 4194304 characters"):
            await templates.render([{"role": "user", "content": "x" * (5 << 20)}])
        with pytest.raises(PromptError, match=r"take 33554.* bytes, .*at most 33554432"):
            await templates.render([{"role": "user", "content": "x" * (32 << 20)}])
        with pytest.raises(PromptError, match="more than 256 MiB"):
            await templates.render([{"role": "user", "content": "x" * (31 << 20) + "\N{GRINNING FACE}"}])
        assert await templates.render([USER])

    use(action)


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ([], {}, "no messages"),
        (["x"], {}, "message 0 is a str"),
        ([USER], {"chat_template": "{{ raise_exception('not\ud800you') }}"}, r"refused.*not\\ud800you"),
        ([USER], {"chat_template": "{% if %}"}, "TemplateSyntaxError"),
    ],
)
def test_refusals(messages: Any, options: Any, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        use(lambda templates: templates.render(messages, **options))


def test_no_template() -> None:
    async def main() -> None:
        templates = BoundedTemplates({}, {})
        try:
            with pytest.raises(PromptError, match="no chat template"):
                await templates.render([USER])
        finally:
            await templates.close()

    asyncio.run(main())


def test_a_process_killed_at_work_loses_nothing() -> None:
    async def action(templates: BoundedTemplates) -> list[str]:
        renderings = [asyncio.create_task(templates.render([USER], chat_template=SLOW)) for _ in range(3)]
        await until(workers)
        workers()[0].kill()
        return await asyncio.gather(*renderings)

    assert use(action, seconds=30) == ["done"] * 3


def test_a_process_killed_when_idle_is_replaced() -> None:
    async def action(templates: BoundedTemplates) -> None:
        for _ in range(3):
            await templates.render([USER])
            (worker,) = workers()
            worker.kill()

    use(action)


def test_a_rendering_that_always_ends_its_process_is_refused() -> None:
    async def action(templates: BoundedTemplates) -> None:
        rendering = asyncio.create_task(templates.render([USER], chat_template=FOREVER))
        while not rendering.done():
            at_work = workers()
            await asyncio.sleep(0.05)
            for worker in at_work:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
        with pytest.raises(PromptError, match="ended the process"):
            await rendering

    use(action, seconds=30)


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match=r"cannot be started.*No such file"):
        use(lambda templates: templates.render([USER]))


def test_cancelled_renderings_do_not_disturb_others() -> None:
    async def action(templates: BoundedTemplates) -> list[str]:
        tasks = [asyncio.create_task(templates.render([{**USER, "content": str(i)}])) for i in range(60)]
        for step, task in enumerate(tasks):
            if step % 3 == 0:
                await asyncio.sleep(0.002)
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)
        return [
            f">{i}<" for i, answer in enumerate(answers) if isinstance(answer, str) and f"\n{i}<|im_end|>" not in answer
        ]

    assert use(action) == []


def test_closing_ends_what_runs_and_waits() -> None:
    async def action(templates: BoundedTemplates) -> None:
        renderings = [asyncio.create_task(templates.render([USER], chat_template=FOREVER)) for _ in range(4)]
        await until(workers)
        await templates.close()
        for rendering in renderings:
            with pytest.raises(EngineClosedError):
                await rendering
        with pytest.raises(EngineClosedError):
            await templates.render([USER])

    use(action, seconds=30)


def test_files_and_processes_are_given_back() -> None:
    async def action(templates: BoundedTemplates) -> None:
        await templates.render([USER])
        before = len(os.listdir("/proc/self/fd"))
        for source in (FOREVER, HOSTILE["1 GB string"][0]) * 4:
            with pytest.raises(PromptError):
                await templates.render([USER], chat_template=source)
        await templates.render([USER])
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(workers()) == 1

    use(action, seconds=0.1)


def test_the_process_knows_no_secrets_and_may_not_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_API_KEY", "canary")

    async def action(templates: BoundedTemplates) -> None:
        await templates.render([USER])
        (worker,) = workers()
        assert "canary" not in str(worker.environ()) and "PYTHONPATH" in worker.environ()
        soft, hard = worker.rlimit(psutil.RLIMIT_AS)
        assert soft == hard < (1 << 30)
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "torch" not in maps and "tokenizers" not in maps

    use(action)


PARENT = """
import asyncio, sys
from transfuse.text.bounded_templates import BoundedTemplates

async def main():
    templates = BoundedTemplates({"default": "x"}, {}, seconds=600)
    await templates.render([{"role": "user"}])
    rendering = asyncio.create_task(templates.render([{"role": "user"}], chat_template=sys.argv[1]))
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await rendering

asyncio.run(main())
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", PARENT, FOREVER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_the_process_ends_with_its_parent(parent: subprocess.Popen[bytes]) -> None:
    (worker,) = psutil.Process(parent.pid).children()
    assert not ended(worker.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while not ended(worker.pid):
        assert time.monotonic() < deadline, "the process goes on without its parent"
        time.sleep(0.02)
