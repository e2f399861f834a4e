"""Writes a reply as output items, whole and as the events that make them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from openai.types import responses as types
from openai.types.responses.response_content_part_added_event import PartReasoningText
from openai.types.responses.response_reasoning_item import Content as ReasoningContent
from pydantic import BaseModel

from transfuse.server.conversation import arguments_of
from transfuse.server.openai.responses.items import seal
from transfuse.server.openai.responses.tools import OfferedTool, OfferedTools
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

ItemStatus = Literal["completed", "incomplete"]
Written = Iterator[BaseModel]
_Item = (
    types.ResponseOutputMessage
    | types.ResponseReasoningItem
    | types.ResponseFunctionToolCall
    | types.ResponseCustomToolCall
)


class ItemWriter:
    """Gives each run of text, of reasoning, and each call an item of its own; one is open at a time.

    Attributes:
        output: the items; the last one without what is still to come.

    Args:
        response_id: what ids of items are made of.
        tools: what the model was shown.
    """

    def __init__(self, response_id: str, tools: OfferedTools) -> None:
        self.output: list[_Item] = []
        self._tools = tools
        self._suffix = response_id.partition("_")[2]
        self._sequence = 0
        self._text = ""
        self._is_open = False

    def number(self) -> int:
        """The next event's `sequence_number`."""
        self._sequence += 1
        return self._sequence - 1

    def take(self, event: Event) -> Written:
        """What follows from more of the reply."""
        match event:
            case Content(text):
                yield from self._continue("message")
                yield types.ResponseTextDeltaEvent(
                    type="response.output_text.delta", delta=text, logprobs=[], content_index=0, **self._place()
                )
                self._text += text
            case Reasoning(text):
                yield from self._continue("reasoning")
                yield types.ResponseReasoningTextDeltaEvent(
                    type="response.reasoning_text.delta", delta=text, content_index=0, **self._place()
                )
                self._text += text
            case CallStart(_, call_id, name):
                yield from self.close()
                yield from self._start_call(call_id, name)
            case CallArguments(_, text):
                self._text += text
                if self.output[-1].type == "function_call":
                    yield types.ResponseFunctionCallArgumentsDeltaEvent(
                        type="response.function_call_arguments.delta", delta=text, **self._place()
                    )
            case CallEnd():
                yield from self.close()

    def close(self, status: ItemStatus = "completed") -> Written:
        """The end of the open item, if there is one.

        Args:
            status: `incomplete` where the reply was cut off within it.
        """
        if not self._is_open:
            return
        item = self.output[-1]
        match item:
            case types.ResponseOutputMessage():
                yield from self._end_message(item)
            case types.ResponseReasoningItem():
                yield from self._end_reasoning(item)
            case types.ResponseFunctionToolCall():
                item.arguments = self._text
                yield types.ResponseFunctionCallArgumentsDoneEvent(
                    type="response.function_call_arguments.done", arguments=self._text, **self._place()
                )
            case types.ResponseCustomToolCall():
                yield from self._end_custom(item)
        if not isinstance(item, types.ResponseCustomToolCall):  # which has none
            item.status = status
        self._is_open = False
        yield types.ResponseOutputItemDoneEvent(
            type="response.output_item.done", item=item, output_index=self._index(), sequence_number=self.number()
        )

    def _continue(self, kind: Literal["message", "reasoning"]) -> Written:
        """Goes on with the open item if it is of this kind, else starts one."""
        if self._is_open and self.output[-1].type == kind:
            return
        yield from self.close()
        part: Any
        if kind == "message":
            item_id = self._new_id("msg")
            yield from self._start(
                types.ResponseOutputMessage(
                    id=item_id, type="message", role="assistant", status="in_progress", content=[]
                )
            )
            part = types.ResponseOutputText(type="output_text", text="", annotations=[])
        else:
            item_id = self._new_id("rs")
            yield from self._start(
                types.ResponseReasoningItem(id=item_id, type="reasoning", summary=[], content=[], status="in_progress")
            )
            part = PartReasoningText(type="reasoning_text", text="")
        yield types.ResponseContentPartAddedEvent(
            type="response.content_part.added", part=part, content_index=0, **self._place()
        )

    def _start_call(self, call_id: str, name: str) -> Written:
        tool = self._tools.by_name.get(name, OfferedTool(name))
        more: dict[str, Any] = {} if tool.namespace is None else {"namespace": tool.namespace}
        if tool.is_custom:
            item_id = self._new_id("ctc")
            custom = types.ResponseCustomToolCall(
                id=item_id, type="custom_tool_call", call_id=call_id, name=tool.name, input="", **more
            )
            yield from self._start(custom)
            return
        item_id = self._new_id("fc")
        call = types.ResponseFunctionToolCall(
            id=item_id,
            type="function_call",
            call_id=call_id,
            name=tool.name,
            arguments="",
            status="in_progress",
            **more,
        )
        yield from self._start(call)

    def _start(self, item: _Item) -> Written:
        self.output.append(item)
        self._text, self._is_open = "", True
        # A copy: the item grows before the event is sent.
        yield types.ResponseOutputItemAddedEvent(
            type="response.output_item.added",
            item=item.model_copy(),
            output_index=self._index(),
            sequence_number=self.number(),
        )

    def _end_message(self, item: types.ResponseOutputMessage) -> Written:
        part = types.ResponseOutputText(type="output_text", text=self._text, annotations=[])
        item.content = [part]
        yield types.ResponseTextDoneEvent(
            type="response.output_text.done", text=self._text, logprobs=[], content_index=0, **self._place()
        )
        yield types.ResponseContentPartDoneEvent(
            type="response.content_part.done", part=part, content_index=0, **self._place()
        )

    def _end_reasoning(self, item: types.ResponseReasoningItem) -> Written:
        item.content = [ReasoningContent(type="reasoning_text", text=self._text)]
        item.encrypted_content = seal(self._text)
        yield types.ResponseReasoningTextDoneEvent(
            type="response.reasoning_text.done", text=self._text, content_index=0, **self._place()
        )
        part = {"type": "reasoning_text", "text": self._text}
        yield types.ResponseContentPartDoneEvent.model_validate(
            {"type": "response.content_part.done", "part": part, "content_index": 0, **self._place()}
        )

    def _end_custom(self, item: types.ResponseCustomToolCall) -> Written:
        item.input = _input_of(self._text)
        yield types.ResponseCustomToolCallInputDeltaEvent(
            type="response.custom_tool_call_input.delta", delta=item.input, **self._place()
        )
        yield types.ResponseCustomToolCallInputDoneEvent(
            type="response.custom_tool_call_input.done", input=item.input, **self._place()
        )

    def _index(self) -> int:
        return len(self.output) - 1

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1].id, "output_index": self._index(), "sequence_number": self.number()}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}{len(self.output):04x}"


def _input_of(arguments: str) -> str:
    """The text that a custom tool was called with: its one argument, or all where a model named it otherwise."""
    value = arguments_of(arguments).get("input")
    return value if isinstance(value, str) else arguments
