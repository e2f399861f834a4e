"""What a reply says, in the types of the chat API: messages, and the deltas that they are streamed in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_function_tool_call import Function

from transfuse.server.deltas import Delta
from transfuse.server.replies import ReplyReader
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, Reply


def message_of(reply: Reply) -> ChatCompletionMessage:
    """A whole reply; its content is null where it only calls tools."""
    extras: dict[str, Any] = _reasoning(reply.reasoning) if reply.reasoning else {}
    if reply.calls:
        extras["tool_calls"] = [
            ChatCompletionMessageFunctionToolCall(
                id=call.id, type="function", function=Function(name=call.name, arguments=call.arguments)
            )
            for call in reply.calls
        ]
    content = reply.content or (None if reply.calls else "")
    return ChatCompletionMessage(role="assistant", content=content, refusal=None, **extras)


def deltas_of(events: Iterable[Event]) -> list[ChoiceDelta]:
    """What was said, in its order; neighbouring pieces of text are joined."""
    deltas: list[ChoiceDelta] = []
    last: Event | None = None
    text = ""
    for event in events:
        if isinstance(event, Content | Reasoning):
            if type(last) is type(event):
                deltas.pop()
            text = text + event.text if type(last) is type(event) else event.text
            deltas.append(ChoiceDelta(content=text) if isinstance(event, Content) else ChoiceDelta(**_reasoning(text)))
        elif isinstance(event, CallStart):
            function = ChoiceDeltaToolCallFunction(name=event.name, arguments="")
            call = ChoiceDeltaToolCall(index=event.index, id=event.id, type="function", function=function)
            deltas.append(ChoiceDelta(tool_calls=[call]))
        elif isinstance(event, CallArguments):
            function = ChoiceDeltaToolCallFunction(arguments=event.text)
            deltas.append(ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(index=event.index, function=function)]))
        else:
            assert isinstance(event, CallEnd)
        last = event
    return deltas


def finish_reason_of(delta: Delta, reader: ReplyReader) -> Literal["stop", "length", "tool_calls"] | None:
    """Why a continuation ended, if it has; one that was cut off is so whatever it has called."""
    if delta.finish_reason == "stop" and reader.has_calls:
        return "tool_calls"
    return delta.finish_reason


def _reasoning(text: str) -> dict[str, Any]:
    # The name that vLLM has now, and the one that it and DeepSeek's API had first.
    return {"reasoning": text, "reasoning_content": text}
