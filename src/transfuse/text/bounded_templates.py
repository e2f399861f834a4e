"""Renders chat templates in processes of their own, bounded in time and memory, without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transfuse.errors import EngineClosedError, EngineError, PromptError
from transfuse.text import template_worker as worker
from transfuse.text.template_data import to_conversation, to_plain
from transfuse.text.template_process import TemplateProcess, TemplateProcessError

_MAX_PROCESSES = 2
_PATIENCE = 0.25  # seconds that a rendering waits for a busy process before another one is started
_MAX_REQUEST_BYTES = 32 << 20
_ATTEMPTS = 2  # a process that is gone may have been killed from outside


class _Job:
    """A rendering that waits for a process or is under way in one."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.taken = False
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class BoundedTemplates:
    """The chat templates of a model, for a server: no template or conversation can take its time or memory.

    Jinja's sandbox keeps templates from reaching into Python. It does not bound nested loops, long strings or huge
    numbers: those run in a process that is killed when it exceeds a limit. One process serves ordinary traffic; a
    second one takes over while it is busy for long. All methods belong to one event loop.

    Args:
        sources: Jinja source by name; the usual one is `default`.
        special_tokens: what templates read, such as `bos_token`, by name.
        seconds: most time for one rendering.
        memory_bytes: most memory for one rendering, beyond what its process takes.
        max_chars: longest text.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str | list[str]],
        *,
        seconds: float = 2.0,
        memory_bytes: int = 256 << 20,
        max_chars: int = 4 << 20,
    ) -> None:
        self._settings: dict[str, Any] = {
            "sources": dict(sources),
            "special_tokens": dict(special_tokens),
            "memory_bytes": memory_bytes,
            "max_chars": max_chars,
        }
        self._seconds = seconds
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._unanswered: set[_Job] = set()
        self._lanes: list[asyncio.Task[None]] = []
        self._closed = False

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; see `ChatTemplates.render`.

        Cancelling it is safe; the process finishes what it is at.

        Raises:
            EngineClosedError: this was closed.
            EngineError: no process can be started.
            PromptError: there is no template, it refuses the messages, or the rendering exceeds a limit.
        """
        if self._closed:
            raise EngineClosedError("The chat templates were closed; no conversation can be laid out any more.")
        options = {"add_generation_prompt": add_generation_prompt, "chat_template": chat_template, "tools": tools}
        job = _Job(_request(messages, {**kwargs, **options}))
        self._unanswered.add(job)
        try:
            self._jobs.put_nowait(job)
            if not self._lanes:
                self._open_lane()
            await asyncio.wait({job.answer}, timeout=_PATIENCE)
            if not job.taken and len(self._lanes) < _MAX_PROCESSES and not self._closed:
                self._open_lane()
            return await job.answer
        finally:
            self._unanswered.discard(job)
            job.answer.cancel()

    async def close(self) -> None:
        """End the processes; renderings that are not done raise `EngineClosedError`. Closing twice is fine."""
        self._closed = True
        for job in self._unanswered:
            if not job.answer.done():
                job.answer.set_exception(EngineClosedError("The chat templates were closed during a rendering."))
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    def _open_lane(self) -> None:
        self._lanes.append(asyncio.create_task(self._lane(), name="chat templates"))

    async def _lane(self) -> None:
        """Serves renderings one by one with a process, which is made anew after one that broke a limit."""
        process = TemplateProcess(self._settings)
        try:
            while True:
                job = await self._jobs.get()
                if job.answer.done():
                    continue  # nobody waits for it any more
                job.taken = True
                try:
                    text = await self._serve(process, job.request)
                except Exception as error:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                else:
                    if not job.answer.done():
                        job.answer.set_result(text)
        finally:
            await process.kill()

    async def _serve(self, process: TemplateProcess, request: bytes) -> str:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                kind, content = await process.ask(request, self._seconds)
            except TimeoutError:
                raise PromptError(
                    f"The chat template takes longer than {self._seconds:g} s with these messages. Send fewer or "
                    "shorter messages, or use another template."
                ) from None
            except TemplateProcessError:
                continue
            except EngineError:
                if attempt == _ATTEMPTS:
                    raise
                continue
            return self._read(kind, content)
        raise PromptError(
            "The chat template ended the process that renders it, twice, with these messages. Use another template."
        )

    def _read(self, kind: bytes, content: bytes) -> str:
        if kind == worker.TEXT:
            return content.decode("utf-8", "surrogatepass")
        if kind == worker.REFUSED:
            raise PromptError(content.decode("utf-8"))
        if kind == worker.OUT_OF_MEMORY:
            raise PromptError(
                f"The chat template takes more than {self._settings['memory_bytes'] >> 20} MiB of memory with these "
                "messages. Send fewer or shorter messages, or use another template."
            )
        if kind == worker.TOO_LONG:
            raise PromptError(
                f"The chat template makes a text of more than {self._settings['max_chars']} characters of these "
                "messages. Send fewer or shorter messages, or use another template."
            )
        raise EngineError(f"The process that renders chat templates answered {kind!r}; expected one of its answers.")


def _request(messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> bytes:
    try:
        content = {**to_plain(options), "messages": to_conversation(messages)}
        request = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except PromptError:
        raise
    except (RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PromptError(f"The messages cannot be given to a chat template: {reason}") from error
    if len(request) > _MAX_REQUEST_BYTES:
        raise PromptError(
            f"The messages take {len(request)} bytes, and a chat template is given at most {_MAX_REQUEST_BYTES}. Send "
            "fewer or shorter messages."
        )
    return request
