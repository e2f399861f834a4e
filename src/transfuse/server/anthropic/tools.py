"""The tools of a request to the Anthropic API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from transfuse.server.anthropic.blocks import CacheControl, ToolName
from transfuse.server.bodies import ApiModel, refusal
from transfuse.server.replies import ToolUse, function_tool


def _refuse_hosted(value: Any) -> Any:
    """Names the kinds of tools that have no schema in the request."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = (
            f"a tool of type {kind[:40]!r} is not served: only Anthropic's models know it, or its servers run it; "
            "define it as a custom tool with an input_schema"
        )
        raise refusal(message)
    return value


class InputSchema(ApiModel):
    """The JSON schema of a tool's arguments."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"]


class Tool(ApiModel):
    """A tool that the client runs.

    Attributes:
        eager_input_streaming: taken and not needed: arguments are sent as soon as they are sure.
    """

    name: ToolName
    input_schema: InputSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[
        Literal[False] | None, Field(description="Tools are not searched for; send those that may be called.")
    ] = None
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        examples = {"input_examples": self.input_examples} if self.input_examples else {}
        return function_tool(
            self.name, self.description, self.input_schema.model_dump(), strict=self.strict, **examples
        )


AnyTool = Annotated[Tool, BeforeValidator(_refuse_hosted)]


class _ToolChoice(ApiModel):
    disable_parallel_tool_use: bool | None = None


class FreeToolChoice(_ToolChoice):
    """Whether the model may or must call tools."""

    type: Literal["auto", "any", "none"]


class NamedToolChoice(_ToolChoice):
    """The tool that the model has to call."""

    type: Literal["tool"]
    name: str


ToolChoice = Annotated[FreeToolChoice | NamedToolChoice, Field(discriminator="type")]
_MODES: Final[dict[str, Literal["auto", "required", "none"]]] = {"auto": "auto", "any": "required", "none": "none"}


def tool_use_of(tools: list[Tool], choice: FreeToolChoice | NamedToolChoice | None) -> ToolUse:
    """How the tools of a request may be used; as the model likes, by default."""
    functions = [tool.as_function() for tool in tools]
    if choice is None:
        return ToolUse(tools=functions)
    is_parallel = choice.disable_parallel_tool_use is not True
    if isinstance(choice, NamedToolChoice):
        return ToolUse(tools=functions, mode="required", name=choice.name, is_parallel=is_parallel)
    return ToolUse(tools=functions, mode=_MODES[choice.type], is_parallel=is_parallel)
