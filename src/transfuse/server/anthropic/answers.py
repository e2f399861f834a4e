"""`/v1/messages`: an answer as a message, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from anthropic.types import (
    Message,
    MessageDeltaUsage,
    OutputTokensDetails,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    StopReason,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta as MessageDelta
from pydantic import BaseModel

from transfuse.server.anthropic.requests import MessagesRequest
from transfuse.server.anthropic.writing import BlockEvent, BlockWriter
from transfuse.server.deltas import Delta
from transfuse.server.errors import Problem, request_id_of
from transfuse.server.generation import Generation
from transfuse.server.replies import Growth, ReplyPlan
from transfuse.server.responding import SpokenAnswer
from transfuse.server.streams import event


class MessageAnswer(SpokenAnswer):
    """A `Message`, or its events.

    Args:
        body: what was asked for.
        generation: what grows.
        plan: how the reply is read.
        model: the name of the model that it carries.
    """

    idle: ClassVar[str] = event("ping", '{"type":"ping"}')

    def __init__(self, body: MessagesRequest, generation: Generation, plan: ReplyPlan, model: str) -> None:
        super().__init__(generation, plan)
        self._model = model
        self._id = f"msg_{request_id_of(generation.request)}"
        self._max_tokens = body.max_tokens
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._writer = BlockWriter(shows_thinking=shows_thinking)
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    def start(self) -> str:
        """See `SpokenAnswer.start`."""
        return _event(RawMessageStartEvent(type="message_start", message=self._message())) + self.idle

    def take(self, growth: Growth) -> Iterator[str]:
        """See `SpokenAnswer.take`."""
        for each in growth.events:
            yield from map(_event, self._writer.take(each))
        if growth.delta.finish_reason is not None:
            yield from map(_event, self._writer.close())
            self._stop_reason = self._reason(growth.delta)
            if self._stop_reason == "stop_sequence":
                self._stop_sequence = str(growth.delta.stop_reason)

    def end(self) -> str:
        """See `SpokenAnswer.end`."""
        delta = MessageDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        usage = MessageDeltaUsage(**self._counts())
        last = RawMessageDeltaEvent(type="message_delta", delta=delta, usage=usage, **self.explanation())
        return _event(last) + _event(RawMessageStopEvent(type="message_stop"))

    def fail(self, problem: Problem) -> str:
        """See `SpokenAnswer.fail`."""
        return event("error", problem.json(self.generation.request.scope))

    def whole(self) -> str:
        """See `SpokenAnswer.whole`."""
        return _json(self._message(**self.explanation()))

    def _reason(self, delta: Delta) -> StopReason:
        if delta.finish_reason == "length":
            ended_early = self.num_output_tokens < self._max_tokens
            return "model_context_window_exceeded" if ended_early else "max_tokens"
        if isinstance(delta.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self._writer.has_calls else "end_turn"

    def _message(self, **more: Any) -> Message:
        """The message as far as it has come."""
        return Message(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=list(self._writer.blocks),
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=Usage(**self._counts(), service_tier="standard"),
            **more,
        )

    def _counts(self) -> dict[str, Any]:
        """The counts so far; input tokens from the cache are counted apart from the others, as the API does."""
        return {
            "input_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": OutputTokensDetails(thinking_tokens=self.num_reasoning_tokens),
        }


def _event(model: BlockEvent | RawMessageStartEvent | RawMessageDeltaEvent | RawMessageStopEvent) -> str:
    return event(model.type, _json(model))


def _json(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True)
