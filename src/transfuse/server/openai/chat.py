"""`/v1/chat/completions`: answering conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk
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
from transfuse.server.openai.spoken import deltas_of, finish_reason_of, message_of
from transfuse.server.replies import Growth, ReplyPlan, ReplyReader
from transfuse.text.replies import Reply


async def read_conversation(service: Service, body: ChatRequest) -> list[ReadPrompt]:
    """The conversation as token ids, laid out by the chat template."""
    conversation = Conversation(as_template_data(body.messages), body.layout_arguments(service.settings))
    return [await conversation.read(service.llm, add_special_tokens=bool(body.add_special_tokens))]


class ChatAnswer(Answer):
    """A `ChatCompletion`, or its chunks.

    Args:
        body: what was asked for.
        generation: what grows.
        plan: how replies are read.
        answer_id: the `id` of the answer.
        model: the name of the model that it carries.
    """

    takes_one_prompt = True

    def __init__(self, body: ChatRequest, generation: Generation, plan: ReplyPlan, answer_id: str, model: str) -> None:
        super().__init__(body, generation, answer_id, model)
        self._num_top = body.top_logprobs or 0
        self._plan = plan
        self._readers: dict[int, ReplyReader] = {}
        self._replies: dict[int, Reply] = {}

    def num_reasoning_tokens(self) -> int | None:
        """See `Answer.num_reasoning_tokens`."""
        if not self._plan.format.reads_reasoning:
            return None
        return sum(reader.num_reasoning_tokens for reader in self._readers.values())

    def _reader(self, index: int) -> ReplyReader:
        if index not in self._readers:
            self._readers[index] = self._plan.reader(self.generation.prompts[0], streams=self.generation.stream)
        return self._readers[index]

    def take(self, output: RequestOutput) -> None:
        """See `Answer.take`."""
        for completion in output.outputs:
            growth = self._reader(completion.index).advance(completion)
            if growth is not None:
                self._replies.setdefault(completion.index, Reply()).add(growth.events)

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
        finish_reason = finish_reason_of(delta, self._reader(index))
        assert finish_reason is not None, "it has ended"
        logprobs = self._logprobs(delta)
        return whole_types.Choice(
            index=index,
            message=message_of(self._replies[index]),
            logprobs=None if logprobs is None else whole_types.ChoiceLogprobs(content=logprobs),
            finish_reason=finish_reason,
            **extras,
        )

    def choices_of(self, output: RequestOutput, first_index: int) -> Iterator[chunk_types.Choice]:
        """What the continuations gained, as choices of chunks; first of each comes who speaks."""
        for completion in output.outputs:
            index = first_index + completion.index
            growth = self._reader(index).advance(completion)
            if growth is None:
                continue
            if growth.delta.is_first:
                start = chunk_types.ChoiceDelta(role="assistant", content="")
                extras: dict[str, Any] = {}
                if self.returns_token_ids:
                    extras["prompt_token_ids"] = output.prompt_token_ids
                yield chunk_types.Choice(index=index, delta=start, logprobs=None, finish_reason=None, **extras)
            yield from self._chunk_choices(growth, index)

    def _chunk_choices(self, growth: Growth, index: int) -> Iterator[chunk_types.Choice]:
        """A choice for each thing that was said: with the first the tokens, with the last the end."""
        delta = growth.delta
        said = deltas_of(growth.events)
        is_told = delta.finish_reason is not None or delta.logprobs is not None or self.returns_token_ids
        if not said and is_told:
            said = [chunk_types.ChoiceDelta()]
        for place, each in enumerate(said):
            extras: dict[str, Any] = {}
            logprobs = None
            if place == 0:
                if self.returns_token_ids:
                    extras["token_ids"] = delta.token_ids
                logprobs = self._logprobs(delta)
            finish_reason = finish_reason_of(delta, self._reader(index)) if place == len(said) - 1 else None
            if finish_reason is not None:
                extras["stop_reason"] = delta.stop_reason
            yield chunk_types.Choice(
                index=index,
                delta=each,
                logprobs=None if logprobs is None else chunk_types.ChoiceLogprobs(content=logprobs),
                finish_reason=finish_reason,
                **extras,
            )

    def chunk(self, choices: list[Any], head: dict[str, Any]) -> ChatCompletionChunk:
        """A chunk with these choices."""
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **head)

    def _logprobs(self, delta: Delta) -> list[Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, self._num_top, self.tokenizer)
