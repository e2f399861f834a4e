"""The tools of a request to the Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from transfuse.server.bodies import MAX_TOOLS, ApiModel, refusal
from transfuse.server.errors import FieldError
from transfuse.server.openai.responses.items import offered_name
from transfuse.server.replies import ToolUse, function_tool

# Agents offer these beside their own tools, and work without; the API runs them, or only its models know them.
_LEFT_OUT: Final = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
        "local_shell",
    }
)
_READ: Final = frozenset({"function", "custom", "namespace"})

ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]


class _Tool(ApiModel):
    name: ToolName
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    is_async: Literal[False] | None = Field(default=None, alias="async")
    defer_loading: Annotated[
        Literal[False] | None, Field(description="Tools are not searched for; send those that may be called.")
    ] = None


class FunctionTool(_Tool):
    """A function that the client runs; what it returns is not held to `output_schema`."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None

    def as_function(self, name: str) -> dict[str, Any]:
        """The tool as chat templates read it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return function_tool(name, self.description, parameters, strict=self.strict)


class _TextFormat(ApiModel):
    type: Literal["text"]


class _GrammarFormat(ApiModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(_Tool):
    """A tool that takes text. The model is shown it as a function of one argument, and its grammar in words."""

    type: Literal["custom"]
    format: Annotated[_TextFormat | _GrammarFormat, Field(discriminator="type")] | None = None

    def as_function(self, name: str) -> dict[str, Any]:
        """The tool as chat templates read it."""
        description = self.description or ""
        if isinstance(self.format, _GrammarFormat):
            description += f"\n\nThe input follows this {self.format.syntax} grammar:\n{self.format.definition}"
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The tool's input, as it is."}},
            "required": ["input"],
        }
        return function_tool(name, description.strip(), parameters)


OwnTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(ApiModel):
    """Tools that belong together; the model is shown each as `namespace__name`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS)]


class LeftOutTool(ApiModel):
    """A tool that this server does not run, beside others: it is left out, and not among the answer's `tools`."""

    type: str


def _refuse_hosted(value: Any) -> Any:
    """Names the kinds of tools that are not served."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in _READ:
        return value
    if kind in _LEFT_OUT:
        return LeftOutTool(type=kind)
    message = (
        f"a tool of type {kind[:40]!r} is not served: the API runs it itself; offer a function that the client runs"
    )
    raise refusal(message)


def _tag(value: Any) -> str | None:
    return "left_out" if isinstance(value, LeftOutTool) else value.get("type") if isinstance(value, dict) else None


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[LeftOutTool, Tag("left_out")],
    Discriminator(_tag),
    BeforeValidator(_refuse_hosted),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """How a tool that the model calls is told to the client.

    Attributes:
        name: as the client knows it.
        namespace: that it belongs to, if any.
        is_custom: whether it takes text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the model is shown.

    Attributes:
        definitions: as chat templates read them.
        by_name: by the name that the model is shown.
        echoed: the tools of the request but for those that were left out.
    """

    definitions: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, OfferedTool] = field(default_factory=dict)
    echoed: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, tools: list[FunctionTool | CustomTool | NamespaceTool | LeftOutTool]) -> OfferedTools:
        """What is offered of a request's tools.

        Raises:
            FieldError: none of them is served, two have one name, or they are too many.
        """
        offered = cls()
        for index, tool in enumerate(tools):
            for one, namespace in _leaves(tool):
                name = offered_name(one.name, namespace)
                if name in offered.by_name:
                    raise FieldError("tools", f"tools[{index}]: there are two tools {name!r}; name them differently.")
                offered.by_name[name] = OfferedTool(one.name, namespace, isinstance(one, CustomTool))
                offered.definitions.append(one.as_function(name))
            if not isinstance(tool, LeftOutTool):
                offered.echoed.append(tool.model_dump(mode="json", exclude_unset=True, by_alias=True))
        if len(offered.definitions) > MAX_TOOLS:
            raise FieldError("tools", f"tools are {len(offered.definitions)}; at most {MAX_TOOLS} are taken.")
        if tools and not offered.echoed:
            kinds = ", ".join(sorted({repr(tool.type) for tool in tools}))
            raise FieldError(
                "tools",
                f"tools: this server runs no tools of type {kinds}. Offer functions that the client runs.",
                "unsupported_parameter",
            )
        return offered


def _leaves(
    tool: FunctionTool | CustomTool | NamespaceTool | LeftOutTool,
) -> Iterator[tuple[FunctionTool | CustomTool, str | None]]:
    if isinstance(tool, NamespaceTool):
        yield from ((one, tool.name) for one in tool.tools)
    elif not isinstance(tool, LeftOutTool):
        yield tool, None


class NamedTool(ApiModel):
    """The tool that the model has to call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


_MODES: Final = ("none", "auto", "required")


def _read_choice(value: Any) -> Any:
    if value in _MODES:
        return value
    if not isinstance(value, dict) or value.get("type") not in ("function", "custom"):
        modes = ", ".join(f'"{mode}"' for mode in _MODES)
        raise ValueError(f'expected {modes} or {{"type": "function", "name": "..."}}')
    return NamedTool.model_validate(value)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_read_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]


def tool_use_of(tools: OfferedTools, choice: ToolChoice | None, *, is_parallel: bool) -> ToolUse:
    """How the tools may be used.

    Args:
        tools: that the model is shown.
        choice: whether it may or must call some; it may by default.
        is_parallel: whether it may make several calls at once.
    """
    if isinstance(choice, NamedTool):
        name = offered_name(choice.name, choice.namespace)
        return ToolUse(tools=tools.definitions, mode="required", name=name, is_parallel=is_parallel)
    return ToolUse(tools=tools.definitions, mode=choice or "auto", is_parallel=is_parallel)
