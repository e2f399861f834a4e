"""`/v1/chat/completions`: answering conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat import chat_completion as whole_types
from openai.types.chat import chat_completion_chunk as chunk_types

from transfuse.outputs import RequestOutput
from transfuse.server.conversation import Conversation
from transfuse.server.deltas import Delta, whole
from transfuse.server.generation import Generation, ReadPrompt, Service
from transfuse.server.openai.answers import Answer
from transfuse.server.openai.logprobs import chat_logprobs, prompt_logprobs
from transfuse.server.openai.messages import as_template_data
from transfuse.server.openai.requests import ChatRequest


async def read_conversation(service: Service, body: ChatRequest) -> list[ReadPrompt]:
    """The conversation as token ids, laid out by the chat template."""
    conversation = Conversation(as_template_data(body.messages), body.layout_arguments(service.settings))
    return [await conversation.read(service.llm, add_special_tokens=bool(body.add_special_tokens))]


class ChatAnswer(Answer):
    """A `ChatCompletion`, or its chunks.

    Args:
        body: what was asked for.
        generation: what grows.
        answer_id: the `id` of the answer.
        model: the name of the model that it carries.
    """

    def __init__(self, body: ChatRequest, generation: Generation, answer_id: str, model: str) -> None:
        super().__init__(body, generation, answer_id, model)
        self._num_top = body.top_logprobs or 0

    def whole(self, head: dict[str, Any]) -> ChatCompletion:
        """The complete answer, but for what `head` holds."""
        output = self.generation.outputs[0]
        extras: dict[str, Any] = {}
        if self.returns_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        choices = [self._choice(whole(completion), completion.index) for completion in output.outputs]
        return ChatCompletion(object="chat.completion", choices=choices, **head, **extras)

    def _choice(self, delta: Delta, index: int) -> whole_types.Choice:
        extras: dict[str, Any] = {"stop_reason": delta.stop_reason}
        if self.returns_token_ids:
            extras["token_ids"] = delta.token_ids
        assert delta.finish_reason is not None, "it has ended"
        logprobs = self._logprobs(delta)
        return whole_types.Choice(
            index=index,
            message=ChatCompletionMessage(role="assistant", content=delta.text, refusal=None),
            logprobs=None if logprobs is None else whole_types.ChoiceLogprobs(content=logprobs),
            finish_reason=delta.finish_reason,
            **extras,
        )

    def choices_of(self, output: RequestOutput, first_index: int) -> Iterator[chunk_types.Choice]:
        """What the continuations gained, as choices of chunks; first of each comes who speaks."""
        for completion in output.outputs:
            index = first_index + completion.index
            delta = self.cursor(index).advance(completion)
            if delta is None:
                continue
            if delta.is_first:
                start = chunk_types.ChoiceDelta(role="assistant", content="")
                extras: dict[str, Any] = {}
                if self.returns_token_ids:
                    extras["prompt_token_ids"] = output.prompt_token_ids
                yield chunk_types.Choice(index=index, delta=start, logprobs=None, finish_reason=None, **extras)
            yield self._chunk_choice(delta, index)

    def _chunk_choice(self, delta: Delta, index: int) -> chunk_types.Choice:
        extras: dict[str, Any] = {"token_ids": delta.token_ids} if self.returns_token_ids else {}
        if delta.finish_reason is not None:
            extras["stop_reason"] = delta.stop_reason
        logprobs = self._logprobs(delta)
        return chunk_types.Choice(
            index=index,
            delta=chunk_types.ChoiceDelta(content=delta.text),
            logprobs=None if logprobs is None else chunk_types.ChoiceLogprobs(content=logprobs),
            finish_reason=delta.finish_reason,
            **extras,
        )

    def chunk(self, choices: list[Any], head: dict[str, Any]) -> ChatCompletionChunk:
        """A chunk with these choices."""
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **head)

    def _logprobs(self, delta: Delta) -> list[Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, self._num_top, self.tokenizer)
