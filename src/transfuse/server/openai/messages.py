"""The messages of a conversation, and what else lays them out."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import ConfigDict, Field, PlainValidator, model_validator

from transfuse.server.bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ApiModel
from transfuse.server.conversation import arguments_of
from transfuse.server.errors import FieldError
from transfuse.server.openai.tools import Tools
from transfuse.server.settings import ServerSettings

_MAX_KWARGS = 64
_MAX_KWARGS_BYTES = 16 * 1024
_MAX_KWARGS_DEPTH = 8
# They have fields of their own, with checks of their own.
_RESERVED = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "documents"}
)


class TextPart(ApiModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _read_content(value: Any) -> str | None:
    """Parts are joined by a line break, as in vLLM."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise ValueError(f"expected text, or a list of 1 to {MAX_PARTS} text parts")
    return "\n".join(_read_part(index, part) for index, part in enumerate(value))


def _read_part(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        shown = f"of type {kind[:40]!r}" if isinstance(kind, str) else "of no known type"
        raise ValueError(f'part {index} is {shown}; this server reads {{"type": "text", "text": "..."}} only')
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError(f"part {index} must have type and text and nothing else")
    return str(part["text"])


def _read_arguments(value: Any) -> Any:
    """Clients send back the text that they got; templates want the object."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str | None):
        raise ValueError("expected a JSON object, as text or as it is")
    return arguments_of(value or "")


class FunctionCall(ApiModel):
    """The function that an earlier answer called."""

    name: str
    arguments: Annotated[
        dict[str, Any], PlainValidator(_read_arguments, json_schema_input_type=str | dict[str, Any])
    ] = Field(default_factory=dict)


class ToolCall(ApiModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ApiModel):
    """One turn of a conversation; fields beside these reach the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, PlainValidator(_read_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    audio: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self


def _read_kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MAX_KWARGS:
        raise ValueError(f"expected an object of at most {_MAX_KWARGS} variables")
    for name in value:
        if not (isinstance(name, str) and name.isidentifier()) or name.startswith("_") or name in _RESERVED:
            raise ValueError(f"{str(name)[:40]!r} is no variable that a request may set here")
    if _depth_exceeds(value, _MAX_KWARGS_DEPTH):
        raise ValueError(f"nested deeper than {_MAX_KWARGS_DEPTH}")
    if len(pydantic_core.to_json(value, inf_nan_mode="strings")) > _MAX_KWARGS_BYTES:
        raise ValueError(f"larger than {_MAX_KWARGS_BYTES} bytes")
    return value


def _depth_exceeds(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_depth_exceeds(item, most - 1) for item in items)


class LayoutFields(ApiModel):
    """How a conversation is laid out as text.

    Attributes:
        add_generation_prompt: end where the assistant's answer starts; so by default, unless the last message goes on.
        continue_final_message: leave the last message open.
        chat_template: a template to use instead of the model's, where the server allows that.
        chat_template_kwargs: variables of the template.
        tools: what the template is told that the model may call.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], PlainValidator(_read_kwargs, json_schema_input_type=dict[str, Any])] | None
    ) = None
    tools: Tools | None = None

    @property
    def tool_definitions(self) -> list[dict[str, Any]]:
        """The tools as templates read them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    def layout_arguments(self, settings: ServerSettings) -> dict[str, Any]:
        """What the rendering is given beside the messages.

        Raises:
            FieldError: the request brings a template and may not.
        """
        if self.chat_template is not None and not settings.allow_client_templates:
            raise FieldError(
                "chat_template",
                "This server takes no templates from requests. Leave chat_template out, or start the server with one.",
            )
        continued = bool(self.continue_final_message)
        generation_prompt = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        arguments = {**(self.chat_template_kwargs or {}), "add_generation_prompt": generation_prompt}
        optional = {
            "chat_template": self.chat_template or settings.chat_template,
            "continue_final_message": continued,
            "tools": self.tool_definitions,
        }
        return arguments | {name: value for name, value in optional.items() if value}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def as_template_data(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them, with whatever else their clients said in them.

    Calls and results without ids get some: a result belongs to the oldest call that has none yet.
    """
    data = [message.model_dump(exclude_unset=True) for message in messages]
    unanswered: dict[str, None] = {}
    ids = (f"{number:09}" for number in itertools.count())  # nine letters and digits: what the strictest template takes
    for message in data:
        for call in message.get("tool_calls") or ():
            call["id"] = call.get("id") or next(ids)
            call["type"] = "function"
            call["function"].setdefault("arguments", {})
            unanswered[call["id"]] = None
        if message["role"] in ("assistant", "tool"):
            # Clients send null beside calls, and not every template asks whether there is any.
            message["content"] = message.get("content") or ""
        if message["role"] == "tool":
            if message.get("tool_call_id") is None:
                message["tool_call_id"] = next(iter(unanswered), None) or next(ids)
            unanswered.pop(message["tool_call_id"], None)
        if message.get("tool_calls") == []:
            del message["tool_calls"]
    return data
