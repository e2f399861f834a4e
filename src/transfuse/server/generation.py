"""From a request's prompts to their growing answers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

from starlette.requests import Request

from transfuse.async_llm import AsyncLLM
from transfuse.errors import EngineClosedError, RequestError, StructuredOutputsError
from transfuse.outputs import RequestOutput
from transfuse.sampling_params import SamplingParams
from transfuse.server.admission import Admission
from transfuse.server.auth import salt_for_tenant
from transfuse.server.errors import FieldError, UnknownModelError, request_id_of
from transfuse.server.observe import observed
from transfuse.server.settings import ServerSettings
from transfuse.server.streams import merge


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the model takes it, with its text where the client sent text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes work with.

    Attributes:
        llm: the model.
        settings: of the server.
        numbers: makes the engine's ids unique, whatever ids clients choose.
    """

    llm: AsyncLLM
    settings: ServerSettings
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def served_name(self, name: str | None) -> str:
        """The name that answers carry.

        Raises:
            UnknownModelError: no such model is served.
        """
        served = self.settings.served_model_names
        if name is not None and name not in served:
            raise UnknownModelError(name, served)
        return name or served[0]


@dataclass(slots=True, kw_only=True)
class Generation:
    """The answers to one HTTP request.

    Attributes:
        service: what to work with.
        request: the HTTP request.
        read_prompts: tokenises the prompts.
        num_prompts: how many there are.
        params: how to sample.
        priority: lower is served first under the `priority` policy.
        cache_salt: prompts with different salts never share cache blocks.
        stream: whether the client sees the answers grow.
        adapt: how to sample after a prompt, from that and how to sample; None: as `params` says.
        prompts: the prompts, once they are read.
        outputs: by prompt, its answer so far; there once all have one.
    """

    service: Service
    request: Request
    read_prompts: Callable[[], Awaitable[list[ReadPrompt]]]
    num_prompts: int
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    adapt: Callable[[SamplingParams, ReadPrompt], SamplingParams] | None = None
    prompts: list[ReadPrompt] = field(default_factory=list)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    async def changes(self, pause: float | None = None) -> AsyncGenerator[int | None, None]:
        """Start all prompts, and yield the index of each whose answer has grown.

        Closing it aborts what still runs.

        Args:
            pause: seconds after which None is yielded where no answer has grown; None: never.

        Raises:
            RequestError: a prompt can never be served.
            EngineError: the engine failed, is gone, or has no place.
        """
        with ExitStack() as stack:
            admission: Admission = self.request.app.state.admission
            try:
                stack.enter_context(admission.admit(self.num_prompts * self.params.n))
            except RequestError as error:
                raise FieldError("n", str(error)) from error
            self.prompts = await self.read_prompts()
            answers = [self._answer(prompt) for prompt in self.prompts]
            try:
                async with aclosing(merge(answers, pause)) as changes:
                    async for change in changes:
                        if change is None:
                            yield None
                            continue
                        index, output = change
                        self.outputs[index] = output
                        _raise_failure(output)
                        yield index
            except StructuredOutputsError as error:
                if self.params.structured_outputs is not None:
                    raise
                # Nobody asked for a grammar: the tools' schemas were made into one.
                raise FieldError("tools", f"Calls cannot be held to the parameters of the tools: {error}") from error

    def _answer(self, prompt: ReadPrompt) -> AsyncGenerator[RequestOutput, None]:
        state = self.request.state
        outputs = self.service.llm.generate(
            {"prompt_token_ids": prompt.token_ids},
            self.params if self.adapt is None else self.adapt(self.params, prompt),
            request_id=f"{request_id_of(self.request)}-{next(self.service.numbers)}",
            priority=self.priority,
            cache_salt=salt_for_tenant(state.tenant, self.cache_salt),
        )
        return observed(outputs, record=state.record, stream=self.stream)


def _raise_failure(output: RequestOutput) -> None:
    if output.error is not None:
        raise output.error
    if any(one.finish_reason == "abort" for one in output.outputs):
        raise EngineClosedError("The server is shutting down and ended the request. Send it again.")
