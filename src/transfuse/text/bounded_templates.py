"""Renders chat templates in processes of their own, bounded in time and memory, without holding up the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transfuse.errors import EngineError, PromptError
from transfuse.text import template_worker as worker
from transfuse.text.template_data import to_conversation, to_plain
from transfuse.text.worker import OUT_OF_MEMORY, REFUSED
from transfuse.text.worker_pool import WorkerPool
from transfuse.text.worker_process import WorkerProcessError

_MAX_REQUEST_BYTES = 32 << 20


class BoundedTemplates:
    """The chat templates of a model, for a server: no template or conversation can take its time or memory.

    Jinja's sandbox keeps templates from reaching into Python. It does not bound nested loops, long strings or huge
    numbers: those run in a process that is killed when it exceeds a limit. One process serves ordinary traffic; a
    second one takes over while it is busy for long. All methods belong to one event loop.

    Args:
        sources: Jinja source by name; the usual one is `default`.
        special_tokens: what templates read, such as `bos_token`, by name.
        seconds: most processor time for one rendering; by the clock it may take twice as long.
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
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._max_chars = max_chars
        settings = {
            "sources": dict(sources),
            "special_tokens": dict(special_tokens),
            "memory_bytes": memory_bytes,
            "max_chars": max_chars,
        }
        self._pool = WorkerPool(
            worker.__name__, settings, seconds=seconds, max_answer=4 * max_chars + 1, name="renders chat templates"
        )

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
        options = {"add_generation_prompt": add_generation_prompt, "chat_template": chat_template, "tools": tools}
        try:
            kind, content = await self._pool.ask(_request(messages, {**kwargs, **options}))
        except TimeoutError:
            raise PromptError(
                f"The chat template takes longer than {self._seconds:g} s with these messages. Send fewer or "
                "shorter messages, or use another template."
            ) from None
        except WorkerProcessError as error:
            raise PromptError(
                "The chat template ended the process that renders it, twice, with these messages. Use another template."
            ) from error
        return self._read(kind, content)

    async def close(self) -> None:
        """End the processes; renderings that are not done raise `EngineClosedError`. Closing twice is fine."""
        await self._pool.close()

    def _read(self, kind: bytes, content: bytes) -> str:
        if kind == worker.TEXT:
            return content.decode("utf-8", "surrogatepass")
        if kind == REFUSED:
            raise PromptError(content.decode("utf-8"))
        if kind == OUT_OF_MEMORY:
            raise PromptError(
                f"The chat template takes more than {self._memory_bytes >> 20} MiB of memory with these "
                "messages. Send fewer or shorter messages, or use another template."
            )
        if kind == worker.TOO_LONG:
            raise PromptError(
                f"The chat template makes a text of more than {self._max_chars} characters of these "
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
