"""The bodies of requests, by route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from transfuse.server.bodies import MAX_ID, ApiModel, NumTokens, refused
from transfuse.server.conversation import reasoning_variables
from transfuse.server.errors import FieldError
from transfuse.server.generation import Service
from transfuse.server.openai.fields import GenerationFields, NumLogprobs, TokenId
from transfuse.server.openai.messages import LayoutFields, Messages
from transfuse.server.openai.prompts import TextOrIds, prompt_list
from transfuse.server.openai.tools import NamedTool, ToolChoice
from transfuse.server.replies import ReplyPlan, ToolUse, plan_replies
from transfuse.server.sampling import Sampling
from transfuse.server.settings import ServerSettings

MAX_PROMPTS = 256
MAX_CONTINUATIONS = 1024
_NO_FUNCTIONS = "functions are the older form of tools; send those"
_NO_SEARCH = "this server does not search the web"


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`.

    Attributes:
        max_tokens: most tokens to generate; 16 by default. 0 is for `echo` alone.
        logprobs: how many of the most likely tokens to report beside each one; with `echo` those of the prompt, too.
        echo: start the text with the prompt.
    """

    prompt: Annotated[
        list[TextOrIds],
        PlainValidator(
            prompt_list(MAX_PROMPTS), json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]]
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: Annotated[None, refused("text is only continued, not filled in; put all of it into the prompt")] = None

    @property
    def echoes_only(self) -> bool:
        """Whether the prompt is all that is asked for, as those do who score texts."""
        return self.max_tokens == 0

    @property
    def limit_field(self) -> str | None:
        """What the request says its most tokens in, if it does."""
        return None if self.max_tokens is None else "max_tokens"

    def to_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """How to sample.

        Raises:
            RequestError: fields contradict each other, or ask for too much.
        """
        if self.echoes_only and not self.echo:
            raise FieldError("max_tokens", "max_tokens is 0; expected at least 1, unless echo is true.")
        num_continuations = len(self.prompt) * self.num_continuations
        if num_continuations > MAX_CONTINUATIONS:
            raise FieldError(
                "n",
                f"{len(self.prompt)} prompts times n={self.num_continuations} are {num_continuations} continuations; "
                f"at most {MAX_CONTINUATIONS} are taken in a request.",
            )
        own: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echoes_only:
            # The prompt is computed with the first token, which is then left out.
            own["max_tokens"], own["min_tokens"] = 1, 0
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            own["prompt_logprobs"] = self.logprobs
        return self.resolve(defaults, 16, **own)


class ChatRequest(GenerationFields, LayoutFields):
    """The body of `/v1/chat/completions`.

    Attributes:
        max_completion_tokens: most tokens to generate; by default as many as the context leaves room for.
        max_tokens: the older name of it.
        logprobs: report each token's log-probability.
        top_logprobs: and those of this many most likely ones.
        tool_choice: whether the model may or must call tools, and which one; it may by default.
        parallel_tool_calls: whether it may make several calls at once; it may by default.
        reasoning_effort: how much the model thinks, for templates that read it; `none` switches it off.
        add_special_tokens: let the tokenizer add its own beside those that the template writes; false by default.
    """

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    max_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Annotated[None, refused("this server answers with text only")] = None
    functions: Annotated[None, refused(_NO_FUNCTIONS)] = None
    function_call: Annotated[Literal["none"] | None, Field(description=_NO_FUNCTIONS)] = None
    prediction: Annotated[None, refused("predicted outputs are not served; leave prediction out")] = None
    moderation: Annotated[None, refused("this server does not moderate")] = None
    web_search_options: Annotated[None, refused(_NO_SEARCH)] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Annotated[None, refused("no template is told; say it in chat_template_kwargs")] = None

    @property
    def limit_field(self) -> str | None:
        """What the request says its most tokens in, if it does."""
        return next((name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None), None)

    def to_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """How to sample.

        Raises:
            RequestError: fields contradict each other, or ask for what is not served.
        """
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs; set logprobs to true.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise FieldError(
                "max_completion_tokens", "max_completion_tokens and max_tokens differ; give only the first of them."
            )
        own: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        return self.resolve(defaults, None, **own)

    def layout_arguments(self, settings: ServerSettings) -> dict[str, Any]:
        """See `LayoutFields.layout_arguments`."""
        effort = self.reasoning_effort
        variables = reasoning_variables(False, None) if effort == "none" else reasoning_variables(None, effort)
        return {**variables, **super().layout_arguments(settings)}

    def plan(self, service: Service) -> ReplyPlan:
        """How replies are read.

        Raises:
            RequestError: tools and their use contradict each other, or the model's template knows no tools.
        """
        choice = self.tool_choice
        if choice is None:
            choice = "auto" if service.settings.enable_auto_tool_choice else "none"
        use = ToolUse(
            tools=self.tool_definitions,
            mode="required" if isinstance(choice, NamedTool) else choice,
            name=choice.function.name if isinstance(choice, NamedTool) else None,
            is_parallel=self.parallel_tool_calls is not False,
        )
        return plan_replies(service, use, self.chat_template)


class TokenizeRequest(LayoutFields):
    """The body of `/tokenize`: a prompt, or messages.

    Attributes:
        add_special_tokens: let the tokenizer add its own; true by default for a prompt, false for messages.
        return_token_strs: spell the tokens out as the vocabulary does.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
