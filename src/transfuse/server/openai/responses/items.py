"""The items that a conversation consists of in the Responses API."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from transfuse.server.bodies import MAX_PARTS, ApiModel, refusal
from transfuse.server.conversation import Turns, arguments_of

_TEXT_ONLY: Final = "this server's models read text only"
_READ: Final = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
    }
)
_REFUSED_PARTS: Final = frozenset({"input_image", "input_file", "input_audio"})
# Marks reasoning that this server gave out; others' is theirs alone to read.
_SEAL: Final = "transfuse.reasoning.1:"

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=256)]


class _Item(ApiModel):
    id: ItemId | None = None
    status: Status | None = None


class InputText(ApiModel):
    """Text of somebody else than the model."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(ApiModel):
    """Text of the model's. Its annotations and log-probabilities are for its readers, and not shown to the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class RefusalPart(ApiModel):
    """Text in which a model declined."""

    type: Literal["refusal"]
    refusal: str


def _refuse_unread(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _REFUSED_PARTS:
        message = f"a part of type {kind!r} is not read: {_TEXT_ONLY}"
        raise refusal(message)
    return value


def _as_input_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Part = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")]
Parts = Annotated[
    list[Annotated[_Part, BeforeValidator(_refuse_unread)]],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_as_input_parts, json_schema_input_type=str | list[_Part]),
]


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None


class _SummaryText(ApiModel):
    type: Literal["summary_text"]
    text: str


class _ReasoningText(ApiModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought; where its content is left out, it is read from `encrypted_content`."""

    type: Literal["reasoning"]
    summary: Annotated[list[_SummaryText], Field(max_length=MAX_PARTS)] = Field(default_factory=list)
    content: Annotated[list[_ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    def text(self) -> str:
        """The reasoning; empty where only another server could read it."""
        if self.content:
            return "\n".join(part.text for part in self.content)
        sealed = None if self.encrypted_content is None else unseal(self.encrypted_content)
        return "\n".join(part.text for part in self.summary) if sealed is None else sealed


class _Call(_Item):
    call_id: ItemId
    name: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    is_async: bool | None = Field(default=None, alias="async")
    created_by: str | None = None


class FunctionCallItem(_Call):
    """A call that the model made. Arguments that are no JSON object are shown to it as it wrote them."""

    type: Literal["function_call"]
    arguments: str


class CustomToolCallItem(_Call):
    """A call with text for arguments."""

    type: Literal["custom_tool_call"]
    input: str


class _Output(_Item):
    call_id: ItemId
    output: Parts
    caller: dict[str, Any] | None = None
    name: str | None = None
    namespace: str | None = None
    created_by: str | None = None


class FunctionCallOutputItem(_Output):
    """What a call came to."""

    type: Literal["function_call_output"]


class CustomToolCallOutputItem(_Output):
    """What a call with text for arguments came to."""

    type: Literal["custom_tool_call_output"]


class ItemReference(ApiModel):
    """An item of a response that the server remembers."""

    type: Literal["item_reference"]
    id: ItemId


def _with_type(value: Any) -> Any:
    """The API lets messages and references leave their type out; and names what exists and is not read here."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is None:
        return {**value, "type": "message" if "role" in value else "item_reference"}
    if isinstance(kind, str) and kind not in _READ:
        message = f"an item of type {kind[:40]!r} is not read here; leave it out"
        raise refusal(message)
    return value


InputItem = Annotated[
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]
StoredItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
)


def seal(reasoning: str) -> str:
    """Reasoning in a form that clients give back as it is; it hides nothing, since they are shown the text as well."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning; None where it is not of this server's making."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def add_to(turns: Turns, item: StoredItem) -> None:
    """Adds what an item says to a conversation."""
    match item:
        case MessageItem(role="user"):
            turns.add_user(_text(item.content))
        case MessageItem(role="assistant"):
            turns.add_assistant(_text(item.content))
        case MessageItem():
            turns.add_system(_text(item.content))
        case ReasoningItem():
            if text := item.text():
                turns.add_reasoning(text)
        case FunctionCallItem():
            turns.add_call(item.call_id, offered_name(item.name, item.namespace), arguments_of(item.arguments))
        case CustomToolCallItem():
            turns.add_call(item.call_id, offered_name(item.name, item.namespace), {"input": item.input})
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            turns.add_result(item.call_id, _text(item.output))


def offered_name(name: str, namespace: str | None) -> str:
    """The one name that the model knows a tool by."""
    return name if namespace is None else f"{namespace}__{name}"


def _text(parts: list[InputText | OutputText | RefusalPart]) -> str:
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)
