"""Sends an answer whole, or as events while it grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, ClassVar, Final

from starlette.responses import Response

from transfuse.server.errors import Problem, logged_problem_of, request_id_of
from transfuse.server.generation import Generation
from transfuse.server.replies import Growth, ReplyPlan, ReplyReader
from transfuse.server.streams import EventStream, unless_gone

# After so long without anything to say, clients are told that the server is there; some give up after a minute.
PAUSE_SECONDS: Final = 10.0


async def respond(
    generation: Generation,
    complete: Callable[[], Coroutine[Any, Any, str]],
    events: Callable[[], AsyncGenerator[str, None]],
) -> Response:
    """The HTTP response; it starts when the answer does, so that what fails before has its own status.

    Args:
        generation: what grows.
        complete: makes the whole answer as JSON, for those who want no stream.
        events: makes the server-sent events.

    Raises:
        ClientDisconnect: the client has left; the answer was aborted.
    """
    request = generation.request
    if not generation.stream:
        return Response(await unless_gone(request, complete()), media_type="application/json")
    source = events()
    return EventStream(await unless_gone(request, anext(source)), source)


class SpokenAnswer(ABC):
    """One reply to one conversation, in the types of an API.

    Attributes:
        idle: what a stream says when there is nothing else to say.

    Args:
        generation: what grows.
        plan: how the reply is read.
    """

    idle: ClassVar[str]

    def __init__(self, generation: Generation, plan: ReplyPlan) -> None:
        self.generation = generation
        self._plan = plan
        self._reader: ReplyReader | None = None

    @abstractmethod
    def start(self) -> str:
        """The events that a stream starts with."""

    @abstractmethod
    def take(self, growth: Growth) -> Iterable[str]:
        """The events of what the reply gained."""

    @abstractmethod
    def end(self) -> str:
        """The events that a stream ends with."""

    @abstractmethod
    def fail(self, problem: Problem) -> str:
        """The event that a stream ends with where the reply fails."""

    @abstractmethod
    def whole(self) -> str:
        """The complete answer as JSON."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(len(prompt.token_ids) for prompt in self.generation.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that were found in the cache, as far as is known."""
        output = self.generation.outputs.get(0)
        return 0 if output is None else output.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the reply so far."""
        output = self.generation.outputs.get(0)
        return 0 if output is None else len(output.outputs[0].token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are reasoning."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def explanation(self) -> dict[str, Any]:
        """A field of the answer that says how it was served, where the client asked for that."""
        return {"explanation": self.generation.explanations()[0]} if self.generation.explains else {}

    async def respond(self) -> Response:
        """The HTTP response.

        Raises:
            ClientDisconnect: the client has left; the answer was aborted.
        """
        return await respond(self.generation, self._complete, self._events)

    async def _complete(self) -> str:
        async with aclosing(self.generation.changes()) as changes:
            async for _ in changes:
                self._advance()
        return self.whole()

    async def _events(self) -> AsyncGenerator[str, None]:
        """Errors before the first event are raised; a later one is the last event."""
        started = False
        try:
            async with aclosing(self.generation.changes(PAUSE_SECONDS)) as changes:
                async for index in changes:
                    events = "" if started else self.start()
                    events += self.idle if index is None else self._advance()
                    if events:
                        yield events
                        started = True
            yield self.end()
        except Exception as error:
            if not started:
                raise
            yield self.fail(logged_problem_of(error, request_id_of(self.generation.request)))

    def _advance(self) -> str:
        if self._reader is None:
            self._reader = self._plan.reader(self.generation.prompts[0], streams=self.generation.stream)
        growth = self._reader.advance(self.generation.outputs[0].outputs[0])
        return "" if growth is None else "".join(self.take(growth))
