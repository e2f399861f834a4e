"""Sends answers whole or as they grow, the same way for both generating routes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from openai import BaseModel
from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from starlette.responses import Response

from transfuse.outputs import RequestOutput
from transfuse.server.deltas import Cursor
from transfuse.server.errors import logged_problem_of, request_id_of
from transfuse.server.generation import Generation
from transfuse.server.openai.fields import GenerationFields
from transfuse.server.responding import respond

_DONE = "data: [DONE]\n\n"
# Larger answers are written in a thread, so that no stream waits for them: this many take some ten milliseconds.
_MAX_INLINE_ENTRIES = 4096


class Answer(ABC):
    """The answer to one request, in the types of a route.

    Attributes:
        takes_one_prompt: whether there is but one, and so one explanation.

    Args:
        body: what was asked for.
        generation: what grows.
        answer_id: the `id` of the answer.
        model: the name of the model that it carries.
    """

    takes_one_prompt: ClassVar[bool]

    def __init__(self, body: GenerationFields, generation: Generation, answer_id: str, model: str) -> None:
        self.generation = generation
        self.tokenizer = generation.service.llm.tokenizer
        self.returns_token_ids = bool(body.return_token_ids)
        self._num_continuations = body.num_continuations
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        options = body.stream_options
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._always_has_usage = options is not None and bool(options.continuous_usage_stats)
        self._cursors: dict[int, Cursor] = {}

    @abstractmethod
    def whole(self, head: dict[str, Any]) -> BaseModel:
        """The complete answer, but for what `head` holds."""

    @abstractmethod
    def choices_of(self, output: RequestOutput, first_index: int) -> Iterator[BaseModel]:
        """What the continuations of a prompt gained, as choices of chunks."""

    @abstractmethod
    def chunk(self, choices: list[Any], head: dict[str, Any]) -> BaseModel:
        """A chunk with these choices."""

    def num_output_tokens(self, output: RequestOutput) -> int:
        """Tokens generated for a prompt."""
        return sum(len(completion.token_ids) for completion in output.outputs)

    def cursor(self, index: int) -> Cursor:
        """How much of a choice has been sent."""
        return self._cursors.setdefault(index, Cursor())

    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None where the model's replies are not told apart from it."""
        return None

    def usage(self) -> CompletionUsage:
        """The counts of all prompts so far."""
        outputs = self.generation.outputs.values()
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(map(self.num_output_tokens, outputs))
        cached = PromptTokensDetails(cached_tokens=sum(output.num_cached_tokens for output in outputs))
        usage = CompletionUsage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=cached,
        )
        if (num_reasoning := self.num_reasoning_tokens()) is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_reasoning)
        return usage

    def take(self, output: RequestOutput) -> None:  # noqa: B027 - not every answer needs it
        """Read on what a prompt's continuations gained, where the whole answer needs it read."""

    async def complete(self) -> str:
        """The whole answer as JSON, once it is there."""
        async with aclosing(self.generation.changes()) as changes:
            async for index in changes:
                assert index is not None, "pauses are not asked for"
                self.take(self.generation.outputs[index])
        usage, params = self.usage(), self.generation.params
        head = {**self._head, "usage": usage, **self._explanation()}
        num_entries = usage.total_tokens * (1 + (params.logprobs or 0) + (params.prompt_logprobs or 0))
        if num_entries <= _MAX_INLINE_ENTRIES:
            return _json(self.whole(head))
        return await asyncio.to_thread(lambda: _json(self.whole(head)))

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as events, those of one change at a time.

        Errors before the first event are raised; a later one is the last event, and no `[DONE]` follows it.
        """
        started = False
        try:
            async with aclosing(self.generation.changes()) as changes:
                async for index in changes:
                    assert index is not None, "pauses are not asked for"
                    output = self.generation.outputs[index]
                    choices = self.choices_of(output, index * self._num_continuations)
                    if events := "".join(self._event([choice]) for choice in choices):
                        yield events
                        started = True
            if self._ends_with_usage or self.generation.explains:
                yield self._event([])
            yield _DONE
        except Exception as error:
            if not started:
                raise
            request = self.generation.request
            yield f"data: {logged_problem_of(error, request_id_of(request)).json(request.scope)}\n\n"

    def _event(self, choices: list[BaseModel]) -> str:
        head: dict[str, Any] = dict(self._head)
        if self._ends_with_usage or self._always_has_usage:
            head["usage"] = self.usage() if self._always_has_usage or not choices else None
        if not choices:
            head |= self._explanation()
        return f"data: {_json(self.chunk(choices, head))}\n\n"

    def _explanation(self) -> dict[str, Any]:
        if not self.generation.explains:
            return {}
        found = self.generation.explanations()
        return {"explanation": found[0]} if self.takes_one_prompt else {"explanations": found}

    async def respond(self) -> Response:
        """The HTTP response.

        Raises:
            ClientDisconnect: the client has left; the answer was aborted.
        """
        return await respond(self.generation, self.complete, self.events)


def _json(model: BaseModel) -> str:
    # Without warnings: log-probabilities hold nulls that their type has no place for.
    return model.model_dump_json(exclude_unset=True, warnings=False)
