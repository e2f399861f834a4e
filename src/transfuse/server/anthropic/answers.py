"""`/v1/messages`: an answer as a message, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final, Literal

from anthropic.types import (
    Message,
    MessageDeltaUsage,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    StopReason,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta as MessageDelta
from pydantic import BaseModel
from starlette.responses import Response

from transfuse.outputs import RequestOutput
from transfuse.server.anthropic.requests import MessagesRequest
from transfuse.server.anthropic.writing import BlockEvent, BlockWriter
from transfuse.server.deltas import Cursor, Delta
from transfuse.server.errors import logged_problem_of, request_id_of
from transfuse.server.generation import Generation
from transfuse.server.responding import respond
from transfuse.server.streams import event
from transfuse.text.replies import Content

# After so long without anything to say, clients are told that the server is there; some give up after a minute.
PING_SECONDS: Final = 10.0
_PING: Final = event("ping", '{"type":"ping"}')
_STOP: Final = RawMessageStopEvent(type="message_stop")


class MessageAnswer:
    """The answer to one request.

    Args:
        body: what was asked for.
        generation: what grows.
        model: the name of the model that it carries.
    """

    def __init__(self, body: MessagesRequest, generation: Generation, model: str) -> None:
        self._generation = generation
        self._model = model
        self._id = f"msg_{request_id_of(generation.request)}"
        self._max_tokens = body.max_tokens
        self._cursor = Cursor()
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._writer = BlockWriter(shows_thinking=shows_thinking)
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    async def respond(self) -> Response:
        """The HTTP response.

        Raises:
            ClientDisconnect: the client has left; the answer was aborted.
        """
        return await respond(self._generation, self._complete, self._events)

    async def _complete(self) -> str:
        async with aclosing(self._generation.changes()) as changes:
            async for _ in changes:
                pass
        for _ in self._advance():
            pass
        return _json(self._message(self._usage()))

    async def _events(self) -> AsyncGenerator[str, None]:
        """Errors before the first event are raised; a later one is the last event."""
        started = False
        try:
            async with aclosing(self._generation.changes(PING_SECONDS)) as changes:
                async for index in changes:
                    events = "" if started else self._start()
                    started = True
                    events += _PING if index is None else "".join(map(_event, self._advance()))
                    if events:
                        yield events
            yield self._end()
        except Exception as error:
            if not started:
                raise
            request = self._generation.request
            yield event("error", logged_problem_of(error, request_id_of(request)).json(request.scope))

    def _start(self) -> str:
        start = RawMessageStartEvent(type="message_start", message=self._message(self._usage()))
        return _event(start) + _PING

    def _end(self) -> str:
        delta = MessageDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        usage = MessageDeltaUsage(**self._usage().model_dump(exclude_unset=True, exclude={"service_tier"}))
        return _event(RawMessageDeltaEvent(type="message_delta", delta=delta, usage=usage)) + _event(_STOP)

    def _advance(self) -> Iterator[BlockEvent]:
        """The events of what the answer gained."""
        delta = self._cursor.advance(self._generation.outputs[0].outputs[0])
        if delta is None:
            return
        if delta.text:
            yield from self._writer.take(Content(delta.text))
        if delta.finish_reason is not None:
            yield from self._writer.close()
            self._note_end(delta)

    def _note_end(self, delta: Delta) -> None:
        self._stop_reason = self._reason(delta.finish_reason, delta.stop_reason)
        if self._stop_reason == "stop_sequence":
            self._stop_sequence = str(delta.stop_reason)

    def _reason(self, finish_reason: Literal["stop", "length"] | None, stop_reason: int | str | None) -> StopReason:
        if finish_reason == "length":
            ended_early = self._num_output_tokens() < self._max_tokens
            return "model_context_window_exceeded" if ended_early else "max_tokens"
        if isinstance(stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self._writer.has_calls else "end_turn"

    def _message(self, usage: Usage) -> Message:
        """The message as far as it has come."""
        return Message(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=list(self._writer.blocks),
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=usage,
        )

    def _output(self) -> RequestOutput | None:
        return self._generation.outputs.get(0)

    def _num_output_tokens(self) -> int:
        output = self._output()
        return 0 if output is None else len(output.outputs[0].token_ids)

    def _usage(self) -> Usage:
        """The counts so far; input tokens from the cache are counted apart from the others, as the API does."""
        num_input = sum(len(prompt.token_ids) for prompt in self._generation.prompts)
        output = self._output()
        num_cached = 0 if output is None else output.num_cached_tokens
        return Usage(
            input_tokens=num_input - num_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=num_cached,
            output_tokens=self._num_output_tokens(),
            service_tier="standard",
        )


def _event(model: BlockEvent | RawMessageStartEvent | RawMessageDeltaEvent | RawMessageStopEvent) -> str:
    return event(model.type, _json(model))


def _json(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True)
