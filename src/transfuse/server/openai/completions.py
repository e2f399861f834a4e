"""`/v1/completions`: continuing prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from transfuse.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from transfuse.server.deltas import Delta, whole
from transfuse.server.generation import Generation, ReadPrompt, Service
from transfuse.server.openai.answers import Answer
from transfuse.server.openai.logprobs import completion_logprobs, prompt_logprobs
from transfuse.server.openai.prompts import TextOrIds
from transfuse.server.openai.requests import CompletionRequest


async def read_prompts(service: Service, body: CompletionRequest) -> list[ReadPrompt]:
    """The request's prompts as token ids."""
    add_special_tokens = body.add_special_tokens is not False
    return [await _read_prompt(service, prompt, add_special_tokens) for prompt in body.prompt]


async def _read_prompt(service: Service, prompt: TextOrIds, add_special_tokens: bool) -> ReadPrompt:
    if isinstance(prompt, str):
        return ReadPrompt(await service.llm.encode(prompt, add_special_tokens), prompt)
    return ReadPrompt(prompt)


class CompletionAnswer(Answer):
    """A `Completion`, whole or in chunks, which have the same type.

    Args:
        body: what was asked for.
        generation: what grows.
        answer_id: the `id` of the answer.
        model: the name of the model that it carries.
    """

    takes_one_prompt = False

    def __init__(self, body: CompletionRequest, generation: Generation, answer_id: str, model: str) -> None:
        super().__init__(body, generation, answer_id, model)
        self._body = body
        self._offsets: dict[int, int] = {}

    def whole(self, head: dict[str, Any]) -> Completion:
        """The complete answer, but for what `head` holds."""
        choices = [
            self._choice(output, whole(completion), index * len(output.outputs) + completion.index)
            for index, output in sorted(self.generation.outputs.items())
            for completion in map(self._shown, output.outputs)
        ]
        return Completion(object="text_completion", choices=choices, **head)

    def choices_of(self, output: RequestOutput, first_index: int) -> Iterator[CompletionChoice]:
        """What the continuations of a prompt gained, as choices of chunks."""
        if self._echoes_logprobs and len(output.prompt_logprobs or ()) < len(output.prompt_token_ids):
            return  # the first chunk holds them all
        for completion in map(self._shown, output.outputs):
            index = first_index + completion.index
            delta = self.cursor(index).advance(completion)
            if delta is not None:
                yield self._choice(output, delta, index)

    def chunk(self, choices: list[Any], head: dict[str, Any]) -> Completion:
        """A chunk with these choices."""
        return Completion(object="text_completion", choices=choices, **head)

    def num_output_tokens(self, output: RequestOutput) -> int:
        """Tokens generated for a prompt."""
        return 0 if self._body.echoes_only else super().num_output_tokens(output)

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self._body.echo) and self._body.logprobs is not None

    def _shown(self, completion: CompletionOutput) -> CompletionOutput:
        """A continuation, or nothing of it where only the prompt was asked for."""
        if not self._body.echoes_only:
            return completion
        ended = completion.finish_reason is not None
        logprobs = None if completion.logprobs is None else list[Any]()
        return CompletionOutput(completion.index, logprobs=logprobs, finish_reason="length" if ended else None)

    def _choice(self, output: RequestOutput, delta: Delta, index: int) -> CompletionChoice:
        echoes = delta.is_first and bool(self._body.echo)
        extras: dict[str, Any] = {}
        if self.returns_token_ids:
            extras["token_ids"] = delta.token_ids
            if delta.is_first:
                extras["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return CompletionChoice.model_construct(
            index=index,
            text=(self._prompt_text(output, index) if echoes else "") + delta.text,
            logprobs=self._logprobs(output, delta, index, echoes),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            **extras,
        )

    def _prompt_text(self, output: RequestOutput, index: int) -> str:
        text = self.generation.prompts[index // self.generation.params.n].text
        if text is None:
            skip = self.generation.params.skip_special_tokens
            text = self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)
        return text

    def _logprobs(self, output: RequestOutput, delta: Delta, index: int, echoes: bool) -> Logprobs | None:
        if delta.logprobs is None:
            return None
        token_ids = delta.token_ids
        positions: list[LogprobsAtPosition | None] = [*delta.logprobs]
        offset = self._offsets.get(index, 0)
        if echoes:
            assert output.prompt_logprobs is not None, "they are asked for together"
            token_ids, positions = output.prompt_token_ids + token_ids, output.prompt_logprobs + positions
        logprobs = completion_logprobs(token_ids, positions, offset, self.tokenizer)
        self._offsets[index] = offset + sum(map(len, logprobs.tokens or ()))
        return logprobs
