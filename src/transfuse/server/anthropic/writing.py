"""Writes a reply as blocks of a message, whole and as the events that make it up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from anthropic.types import (
    ContentBlock,
    InputJSONDelta,
    RawContentBlockDelta,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

from transfuse.server.conversation import arguments_of
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

BlockEvent = RawContentBlockStartEvent | RawContentBlockDeltaEvent | RawContentBlockStopEvent


class BlockWriter:
    """Gives each run of text, of thinking, and each call a block of its own; one is open at a time.

    Attributes:
        blocks: the blocks, the last one without what is still to come.

    Args:
        shows_thinking: whether the text of thinking is written, and not only that there was some.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self.blocks: list[ContentBlock] = []
        self._shows_thinking = shows_thinking
        self._thinking = ""
        self._arguments = ""
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether the reply calls a tool."""
        return any(block.type == "tool_use" for block in self.blocks)

    def take(self, event: Event) -> Iterator[BlockEvent]:
        """What follows from more of the reply."""
        match event:
            case Content(text):
                yield from self._continue(TextBlock(type="text", text=""))
                block = self.blocks[-1]
                assert block.type == "text"
                block.text += text
                yield self._delta(TextDelta(type="text_delta", text=text))
            case Reasoning(text):
                yield from self._continue(ThinkingBlock(type="thinking", thinking="", signature=""))
                self._thinking += text
                if self._shows_thinking:
                    block = self.blocks[-1]
                    assert block.type == "thinking"
                    block.thinking += text
                    yield self._delta(ThinkingDelta(type="thinking_delta", thinking=text))
            case CallStart(_, call_id, name):
                yield from self._start(ToolUseBlock(type="tool_use", id=call_id, name=name, input={}))
            case CallArguments(_, text):
                self._arguments += text
                yield self._delta(InputJSONDelta(type="input_json_delta", partial_json=text))
            case CallEnd():
                yield from self.close()

    def close(self) -> Iterator[BlockEvent]:
        """The end of the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if block.type == "thinking":
            # Clients send it back with the thinking, and some drop thinking without one. It is not checked.
            block.signature = hashlib.sha256(self._thinking.encode("utf-8", "surrogatepass")).hexdigest()
            self._thinking = ""
            yield self._delta(SignatureDelta(type="signature_delta", signature=block.signature))
        elif block.type == "tool_use":
            block.input = arguments_of(self._arguments)
            self._arguments = ""
        yield RawContentBlockStopEvent(type="content_block_stop", index=len(self.blocks) - 1)

    def _continue(self, block: TextBlock | ThinkingBlock) -> Iterator[BlockEvent]:
        """Goes on with the open block if it is of the same type, else starts this one."""
        if not self._is_open or self.blocks[-1].type != block.type:
            yield from self._start(block)

    def _start(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[BlockEvent]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        # A copy: the block grows before the event is sent.
        copy = block.model_copy()
        yield RawContentBlockStartEvent(type="content_block_start", index=len(self.blocks) - 1, content_block=copy)

    def _delta(self, delta: RawContentBlockDelta) -> RawContentBlockDeltaEvent:
        return RawContentBlockDeltaEvent(type="content_block_delta", index=len(self.blocks) - 1, delta=delta)
