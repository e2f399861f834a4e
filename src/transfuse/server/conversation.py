"""A conversation on its way to the model, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic_core

from transfuse.async_llm import AsyncLLM
from transfuse.server.generation import ReadPrompt

Message = dict[str, Any]
_EFFORTS: Final = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is laid out as a prompt.

    Attributes:
        messages: as chat templates read them.
        arguments: what `AsyncLLM.render_chat` is given beside them.
    """

    messages: list[Message]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    async def read(self, llm: AsyncLLM, *, add_special_tokens: bool = False) -> ReadPrompt:
        """The prompt, laid out by the chat template.

        Args:
            llm: whose template and tokenizer.
            add_special_tokens: whether the tokenizer adds its own; a template writes those that it wants.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        text = await llm.render_chat(self.messages, **self.arguments)
        return ReadPrompt(await llm.encode(text, add_special_tokens), text)


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as the object that templates want.

    Other servers and models leave texts behind that are none. The model is shown such a one as it is, within an object.
    """
    try:
        read = pydantic_core.from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {"malformed_arguments": text}


def reasoning_variables(enabled: bool | None, effort: str | None) -> dict[str, Any]:
    """What templates are told of reasoning, under the names that they have for it.

    Args:
        enabled: whether the model thinks before it answers; None leaves the template's default.
        effort: how much; what most templates do not know is told as the nearest that they do.
    """
    variables: dict[str, Any] = {}
    if enabled is not None:
        variables["enable_thinking"] = variables["thinking"] = enabled
    if effort is not None:
        variables["reasoning_effort"] = _EFFORTS[effort]
    return variables


class Turns:
    """Puts together messages that every chat template takes, out of the pieces that APIs cut conversations into.

    What one side says in several pieces becomes one message, since many templates want turns to alternate. The system
    has the first word only, as most templates want it: what it says later is shown to the model within a user's turn.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._names: dict[str, str] = {}  # of functions, by the id of their call

    @property
    def messages(self) -> list[Message]:
        """The messages so far."""
        return [
            {name: str(value) if isinstance(value, _Text) else value for name, value in message.items()}
            for message in self._messages
        ]

    def add_system(self, text: str) -> None:
        """What the system or the developer says."""
        if not self._messages:
            self._messages.append({"role": "system", "content": _Text("\n\n")})
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"].add(text)
        else:
            self.add_user(f"<system-reminder>\n{text}\n</system-reminder>")

    def add_user(self, text: str) -> None:
        """What the user says."""
        self._turn("user")["content"].add(text)

    def add_assistant(self, text: str) -> None:
        """What the model said."""
        self._turn("assistant")["content"].add(text)

    def add_reasoning(self, text: str) -> None:
        """What the model thought."""
        self._turn("assistant").setdefault("reasoning_content", _Text("\n")).add(text)

    def add_call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """A call that the model made."""
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str, **more: Any) -> None:
        """What a call came to.

        Args:
            call_id: of the call.
            text: the result.
            **more: further fields of the message, for templates that read them.
        """
        name = {"name": self._names[call_id]} if call_id in self._names else {}
        self._messages.append({"role": "tool", "tool_call_id": call_id, **name, "content": text, **more})

    def _turn(self, role: str) -> Message:
        """The message that is added to: the last one, if it is this side's."""
        if not self._messages or self._messages[-1]["role"] != role:
            # With content, if it is only calls: not every template asks whether there is any.
            self._messages.append({"role": role, "content": _Text("\n")})
        return self._messages[-1]


class _Text:
    """What one side says, joined once: a request may cut megabytes into very many pieces."""

    def __init__(self, between: str) -> None:
        self._between = between
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if piece or self._pieces:
            self._pieces.append(piece)

    def __str__(self) -> str:
        return self._between.join(self._pieces)
