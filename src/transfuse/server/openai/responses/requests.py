"""The bodies of requests to the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from transfuse.server.bodies import MAX_MESSAGES, MAX_TOOLS, ApiModel, NumTokens, ShortText, refused
from transfuse.server.conversation import Conversation, Turns, reasoning_variables
from transfuse.server.errors import FieldError, NotStoredError
from transfuse.server.openai.responses.items import InputItem, ItemReference, StoredItem, add_to
from transfuse.server.openai.responses.store import ResponseStore, with_id
from transfuse.server.openai.responses.tools import AnyTool, OfferedTools, ToolChoice, tool_use_of
from transfuse.server.openai.structured import JsonObjectFormat, JsonSchema, TextFormat
from transfuse.server.replies import ToolUse
from transfuse.server.sampling import Sampling
from transfuse.server.settings import ServerSettings
from transfuse.server.structured import held_to

_MAX_METADATA: Final = 16


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class Reasoning(ApiModel):
    """How much the model thinks, where its template leaves that open.

    Attributes:
        summary: taken; reasoning is told whole, and not summarised.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextConfig(ApiModel):
    """The form of the answer; `verbosity` is told to templates that read it."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(ApiModel):
    """What a stream carries beside the answer: no padding, which a proxy may add."""

    include_obfuscation: Literal[False] | None = None


class InputFields(ApiModel):
    """What a prompt is made of.

    Attributes:
        input: what is new; text is short for a message of the user's.
        instructions: for this answer only; those of the previous response do not count any more.
        previous_response_id: of the response that the conversation goes on with.
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: (
        Annotated[
            list[InputItem],
            Field(max_length=MAX_MESSAGES),
            BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    conversation: Annotated[None, refused("conversations are not stored; use previous_response_id")] = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Annotated[
        Literal["disabled"] | None, Field(description="What does not fit is refused; shorten it yourself.")
    ] = None

    def read_items(self, store: ResponseStore, tenant: bytes | None) -> tuple[StoredItem, ...]:
        """The items of the request, each with an id; references are replaced by what they refer to.

        Raises:
            FieldError: a reference leads nowhere, or to where another does: a small request would make a huge prompt.
        """
        items: list[StoredItem] = []
        referred: set[str] = set()
        for index, item in enumerate(self.input or ()):
            if not isinstance(item, ItemReference):
                items.append(with_id(item))
                continue
            place = f"input[{index}].id"
            if item.id in referred:
                raise FieldError(place, f"{place}: item {item.id[:80]!r} is referred to twice; leave one of them out.")
            referred.add(item.id)
            try:
                items.append(store.item(item.id, tenant))
            except NotStoredError as error:
                raise FieldError(place, str(error), "item_not_found") from error
        return tuple(items)

    def items_before(self, store: ResponseStore, tenant: bytes | None) -> tuple[StoredItem, ...]:
        """The conversation that the request goes on with.

        Raises:
            FieldError: it is not remembered.
        """
        if self.previous_response_id is None:
            return ()
        try:
            return store.get(self.previous_response_id, tenant).items
        except NotStoredError as error:
            raise FieldError("previous_response_id", str(error), "previous_response_not_found") from error

    def tool_use(self, tools: OfferedTools) -> ToolUse:
        """How the tools may be used.

        Args:
            tools: that the model is shown.
        """
        return tool_use_of(tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)

    def lay_out(self, items: tuple[StoredItem, ...], tools: OfferedTools, settings: ServerSettings) -> Conversation:
        """What the chat template lays out.

        Raises:
            FieldError: there is nothing to lay out.
        """
        turns = Turns()
        if self.instructions:
            turns.add_system(self.instructions)
        for item in items:
            add_to(turns, item)
        messages = turns.messages
        if not messages:
            raise FieldError("input", "input holds nothing that the model could answer; send at least one message.")
        effort = None if self.reasoning is None else self.reasoning.effort
        off = effort == "none"
        arguments = reasoning_variables(False if off else None, None if off else effort)
        if self.text is not None and self.text.verbosity is not None:
            arguments["verbosity"] = self.text.verbosity
        optional = {"chat_template": settings.chat_template, "tools": tools.definitions}
        given = {name: value for name, value in optional.items() if value}
        return Conversation(messages, {"add_generation_prompt": True, **arguments, **given})


class InputTokensRequest(InputFields):
    """The body of `/v1/responses/input_tokens`."""


class ResponsesRequest(InputFields):
    """The body of `/v1/responses`.

    `user`, `safety_identifier`, `client_metadata` and the `prompt_cache_*` hints describe a request without changing
    its answer; `include` asks for what either is never there or, as `reasoning.encrypted_content`, always is.

    Attributes:
        store: whether the server remembers the response; so by default.
        explain: say with the answer how it was served.
    """

    max_output_tokens: NumTokens | None = None
    max_tool_calls: NumTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    explain: bool | None = None
    include: (
        list[
            Literal[
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_salt: ShortText | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    background_options: Annotated[None, refused("nothing runs in the background here")] = None
    top_logprobs: Literal[0] | None = None
    prompt: Annotated[None, refused("no prompts are stored; send the text")] = None
    moderation: Annotated[None, refused("this server does not moderate")] = None
    context_management: Annotated[None, refused("conversations are not compacted; shorten them yourself")] = None
    access_programs: Annotated[None, refused("this server has no such programs")] = None
    image: Annotated[None, refused("this server's models read text only")] = None

    @property
    def limit_field(self) -> str | None:
        """What the request says its most tokens in, if it does."""
        return None if self.max_output_tokens is None else "max_output_tokens"

    def to_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """How to sample.

        Args:
            defaults: by field, what the model's makers recommend where the request says nothing.
        """
        given: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaFormat):
            given["structured_outputs"] = held_to("text.format", schema=form.schema_)
        elif isinstance(form, JsonObjectFormat):
            given["structured_outputs"] = held_to("text.format", schema=None)
        return Sampling.of(given, defaults, {"max_tokens": None})
