"""The blocks that messages of the Anthropic API consist of."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from transfuse.server.bodies import MAX_PARTS, ApiModel, refusal

_TEXT_ONLY: Final = "this server's models read text only"
_OF_THE_API: Final = "it belongs to a tool that the API runs itself, and this server runs none"
_REFUSED: Final = {
    "image": _TEXT_ONLY,
    "document": f"{_TEXT_ONLY}; put the document's text into a text block",
    "search_result": f"{_TEXT_ONLY}; put the result's text into a text block",
    "container_upload": "this server has no containers",
    "tool_reference": "tools are not searched for here; send those that may be called in tools",
}

ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(ApiModel):
    """A mark for the prompt cache. It is taken and not needed: every prefix of a prompt is cached here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class _Cacheable(ApiModel):
    cache_control: CacheControl | None = None


class TextBlock(_Cacheable):
    """Text. `citations` of an earlier answer's text are for its readers, and not shown to the model."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = None


class ThinkingBlock(ApiModel):
    """What the model thought before an earlier answer; the signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(ApiModel):
    """What a model of another server thought, in a form that only that server reads; left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Cacheable):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: CallId
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def refuse_unread(value: Any) -> Any:
    """Names the kinds of blocks that exist and are not read here."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return value
    reason = _REFUSED.get(kind)
    if reason is None and kind not in _READ and kind.endswith(("_tool_result", "server_tool_use")):
        reason = _OF_THE_API
    if reason is not None:
        message = f"a block of type {kind[:40]!r} is not read: {reason}"
        raise refusal(message)
    return value


def as_blocks(value: Any) -> Any:
    """Text is short for one block of it."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Text = Annotated[TextBlock, BeforeValidator(refuse_unread)]
TextBlocks = Annotated[
    list[_Text],
    Field(max_length=MAX_PARTS),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(_Cacheable):
    """What a call came to; `is_error` is told to the chat template as a field of the message."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextBlocks = Field(default_factory=list)
    is_error: bool | None = None


_READ: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[
    list[Annotated[AnyBlock, BeforeValidator(refuse_unread)]],
    Field(max_length=MAX_PARTS),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[AnyBlock]),
]


def text_of(blocks: list[TextBlock]) -> str:
    """The text of blocks, each on lines of its own."""
    return "\n".join(block.text for block in blocks)
