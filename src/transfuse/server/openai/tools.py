"""The tools of a request, and how they may be used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator

from transfuse.server.bodies import MAX_TOOLS, ApiModel, refusal

ToolName = Annotated[str, Field(min_length=1, max_length=256)]


def _refuse_hosted(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = f"a tool of type {kind[:40]!r} is not served; define it as a function with parameters"
        raise refusal(message)
    return value


class Function(ApiModel):
    """A function that the client runs; fields beside these reach the template as they are.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: hold the arguments to the schema.
    """

    model_config = ConfigDict(extra="allow")

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(ApiModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: Function


AnyTool = Annotated[FunctionTool, BeforeValidator(_refuse_hosted)]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


class FunctionName(ApiModel):
    """Names a function."""

    name: ToolName


class NamedTool(ApiModel):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: FunctionName


_MODES = ("none", "auto", "required")


def _read_choice(value: Any) -> Any:
    if value in _MODES:
        return value
    if not isinstance(value, dict) or value.get("type") != "function":
        modes = ", ".join(f'"{mode}"' for mode in _MODES)
        raise ValueError(f'expected {modes} or {{"type": "function", "function": {{"name": "..."}}}}')
    return NamedTool.model_validate(value)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_read_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]
