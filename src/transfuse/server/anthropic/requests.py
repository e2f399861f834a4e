"""The bodies of requests to the Anthropic API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from transfuse.sampling_params import MAX_STOP_STRINGS
from transfuse.server.anthropic.blocks import (
    Blocks,
    CacheControl,
    TextBlock,
    TextBlocks,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from transfuse.server.anthropic.tools import AnyTool, ToolChoice, tool_use_of
from transfuse.server.bodies import MAX_ID, MAX_MESSAGES, MAX_TOOLS, ApiModel, NumTokens, ShortText, refused
from transfuse.server.conversation import Conversation, Turns, reasoning_variables
from transfuse.server.errors import FieldError
from transfuse.server.replies import ToolUse
from transfuse.server.sampling import Sampling
from transfuse.server.settings import ServerSettings
from transfuse.server.structured import held_to

# A line that Claude Code puts before its instructions, for Anthropic's accounts. It differs from one conversation to
# the next, and would part them from the first token on in the prefix cache.
_BILLING: Final = "x-anthropic-billing-header:"


class Message(ApiModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Metadata(ApiModel):
    """Describes a request without changing its answer."""

    user_id: str | None = None


class Thinking(ApiModel):
    """Whether the model thinks before it answers, where its chat template leaves that open.

    Attributes:
        budget_tokens: taken and not enforced: `max_tokens` bounds thinking and answer together.
        display: `omitted` leaves the thinking's text out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(ApiModel):
    """JSON of a schema.

    Attributes:
        schema_: the schema, `schema` in JSON.
    """

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ApiModel):
    """How much effort, for templates that read `reasoning_effort`; and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(ApiModel):
    """A change to the conversation before it is laid out: none that would change anything."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(ApiModel):
    """Changes to the conversation before it is laid out."""

    edits: Annotated[list[ContextEdit], Field(max_length=16)] = Field(default_factory=list)


class PromptFields(ApiModel):
    """What a prompt is made of.

    `cache_control` and `user_profile_id` are taken and not needed: every prefix of a prompt is cached here, and one
    user's is not another's where they have keys of their own.
    """

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    user_profile_id: str | None = None
    mcp_servers: Annotated[None, refused("this server calls no other servers; offer their tools as your own")] = None

    def conversation(self, settings: ServerSettings) -> Conversation:
        """What is laid out.

        Raises:
            FieldError: the blocks contradict each other.
        """
        turns = Turns()
        system = [block for block in self.system or () if not block.text.startswith(_BILLING)]
        if system:
            turns.add_system(text_of(system))
        for index, message in enumerate(self.messages):
            for place, block in enumerate(message.content):
                _add_block(turns, message.role, block, f"messages[{index}].content[{place}]")
        messages = turns.messages
        if not messages:
            raise FieldError("messages", "messages hold no text; send at least one block of it.")
        continues = self.messages[-1].role == "assistant"
        if continues and messages[-1].get("tool_calls"):
            raise FieldError(
                "messages",
                "messages end with a tool_use block. Send a tool_result for it in a message of the role user.",
            )
        return Conversation(messages, self._arguments(settings, continues))

    def tool_use(self) -> ToolUse:
        """How the tools may be used."""
        return tool_use_of(self.tools or [], self.tool_choice)

    def _arguments(self, settings: ServerSettings, continues: bool) -> dict[str, Any]:
        enabled = None
        if self.thinking is not None and self.thinking.type != "adaptive":
            enabled = self.thinking.type == "enabled"
        effort = None if self.output_config is None else self.output_config.effort
        arguments = {"add_generation_prompt": not continues, **reasoning_variables(enabled, effort)}
        optional = {
            "chat_template": settings.chat_template,
            "continue_final_message": continues,
            "tools": self.tool_use().tools,
        }
        return arguments | {name: value for name, value in optional.items() if value}


def _add_block(turns: Turns, role: str, block: Any, place: str) -> None:
    match role, block:
        case "system", TextBlock(text=text):
            turns.add_system(text)
        case "user", TextBlock(text=text):
            turns.add_user(text)
        case "assistant", TextBlock(text=text):
            turns.add_assistant(text)
        case "assistant", ThinkingBlock(thinking=thinking):
            turns.add_reasoning(thinking)
        case "assistant", ToolUseBlock(id=call_id, name=name, input=arguments):
            turns.add_call(call_id, name, arguments)
        case "user", ToolResultBlock(tool_use_id=call_id, content=content, is_error=is_error):
            turns.add_result(call_id, text_of(content), **({"is_error": True} if is_error else {}))
        case "assistant", _ if block.type == "redacted_thinking":
            pass  # only the server that wrote it can read it
        case _:
            raise FieldError(place, f"{place}: a message of the role {role!r} has no blocks of type {block.type!r}.")


class CountTokensRequest(PromptFields):
    """The body of `/v1/messages/count_tokens`."""


class MessagesRequest(PromptFields):
    """The body of `/v1/messages`.

    `metadata` and `user_profile_id` describe a request without changing its answer; `service_tier`, `speed` and
    `inference_geo` are taken where they ask for nothing.

    Attributes:
        max_tokens: most tokens to generate, thinking included.
        explain: say with the answer how it was served.
    """

    max_tokens: NumTokens
    stop_sequences: Annotated[list[ShortText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    explain: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    inference_geo: Annotated[None, refused("this server is where it is")] = None
    container: Annotated[None, refused("this server has no containers")] = None
    diagnostics: Annotated[None, refused("cache hits are told in usage.cache_read_input_tokens")] = None

    def to_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """How to sample.

        Args:
            defaults: by field, what the model's makers recommend where the request says nothing.
        """
        form = None if self.output_config is None else self.output_config.format
        given = {
            "structured_outputs": None if form is None else held_to("output_config.format", schema=form.schema_),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return Sampling.of(given, defaults)
