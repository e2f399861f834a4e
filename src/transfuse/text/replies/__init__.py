"""What a reply says: its reasoning, its text and its calls of tools, read as it comes."""

from __future__ import annotations

from transfuse.text.replies.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    Reply,
    ToolCall,
)
from transfuse.text.replies.formats import ReplyFormat, choose_format
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.tools import Tools, tools_of

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Reasoning",
    "Reply",
    "ReplyFormat",
    "ReplyParser",
    "ToolCall",
    "Tools",
    "choose_format",
    "tools_of",
]
