"""The tools of a request to the Anthropic API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from transfuse.server.anthropic.blocks import CacheControl, ToolName
from transfuse.server.bodies import ApiModel, refusal


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
    strict: Annotated[Literal[False] | None, Field(description="Arguments are not held to the schema.")] = None

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema.model_dump()
        if self.input_examples:
            function["input_examples"] = self.input_examples
        return {"type": "function", "function": function}


AnyTool = Annotated[Tool, BeforeValidator(_refuse_hosted)]
_NOT_FORCED = 'calls cannot be forced here; set tool_choice to {"type": "auto"} or {"type": "none"}'


class ToolChoice(ApiModel):
    """Whether the model may call tools, and how many at once."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


AnyToolChoice = Annotated[ToolChoice, Field(description=_NOT_FORCED)]
