"""From a request's prompts to their growing answers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from starlette.requests import Request

from transfuse.async_llm import AsyncLLM
from transfuse.errors import EngineClosedError, RequestError, StructuredOutputsError
from transfuse.explanation import explain
from transfuse.front.tasks import wrong_task
from transfuse.outputs import RequestOutput
from transfuse.sampling_params import SamplingParams
from transfuse.server.admission import Admission
from transfuse.server.auth import salt_for_tenant
from transfuse.server.errors import FieldError, UnknownModelError, request_id_of
from transfuse.server.observe import observed
from transfuse.server.sampling import Sampling
from transfuse.server.settings import ServerSettings
from transfuse.server.streams import merge

# For clients whose bodies cannot be changed.
EXPLAIN_HEADER: Final = "x-explain"


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

    def generating_name(self, name: str | None) -> str:
        """The same, for a route that generates.

        Raises:
            UnknownModelError: no such model is served.
            WrongTaskError: the model does not generate.
        """
        served, limits = self.served_name(name), self.llm.limits
        if limits.pooling is not None:
            raise wrong_task(limits, "to generate text")
        return served

    def pooling_name(self, name: str | None, task: Literal["embed", "score"]) -> str:
        """The same, for a route that makes vectors of texts, or scores of pairs.

        Raises:
            UnknownModelError: no such model is served.
            WrongTaskError: the model does neither, or is to make vectors and only scores.
        """
        served, limits = self.served_name(name), self.llm.limits
        # Vectors can be compared: a model that makes them scores, too.
        if limits.pooling is None or (task == "embed" and limits.pooling.task != "embed"):
            raise wrong_task(limits, "to embed texts" if task == "embed" else "to score texts")
        return served


@dataclass(slots=True, kw_only=True)
class Generation:
    """The answers to one HTTP request.

    Attributes:
        service: what to work with.
        request: the HTTP request.
        read_prompts: tokenises the prompts.
        num_prompts: how many there are.
        sampling: how to sample, and where that came from.
        limit_field: what the request calls its most tokens, where more than the context leaves room for is an error;
            None: as many as there is room for.
        priority: lower is served first under the `priority` policy.
        cache_salt: prompts with different salts never share cache blocks.
        stream: whether the client sees the answers grow.
        explain: whether the client is told how it was served; None: if a header says so.
        adapt: how to sample after a prompt, from that and how to sample; None: as `params` says.
        prompts: the prompts, once they are read.
        outputs: by prompt, its answer so far; there once all have one.
    """

    service: Service
    request: Request
    read_prompts: Callable[[], Awaitable[list[ReadPrompt]]]
    num_prompts: int
    sampling: Sampling
    limit_field: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    explain: bool | None = None
    adapt: Callable[[SamplingParams, ReadPrompt], SamplingParams] | None = None
    prompts: list[ReadPrompt] = field(default_factory=list)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """How to sample."""
        return self.sampling.params

    @property
    def explains(self) -> bool:
        """Whether the client is told how it was served."""
        if self.explain is not None:
            return self.explain
        return self.request.headers.get(EXPLAIN_HEADER, "").lower() in {"1", "true"}

    def explanations(self) -> list[dict[str, Any]]:
        """By prompt, how it was served; see `Explanation`. `prepare_seconds` are those before the engine was asked."""
        return [self._explanation(output) for _, output in sorted(self.outputs.items())]

    def _explanation(self, output: RequestOutput) -> dict[str, Any]:
        assert output.metrics is not None, "the engine sets it"
        came = self.request.state.record.start_time
        prepare_seconds = max(0.0, output.metrics.arrival_time - came)
        return {"prepare_seconds": prepare_seconds, **asdict(explain(output, self.sampling.sources_of(output)))}

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
            self._check_room()
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

    def _check_room(self) -> None:
        """Refuse more tokens than there is room for, rather than cut the answer short without a word."""
        most, longest = self.params.max_tokens, self.service.llm.limits.max_model_len
        if self.limit_field is None or most is None:
            return
        for prompt in self.prompts:
            num_prompt = len(prompt.token_ids)
            room = longest - num_prompt
            if 0 < room < most:
                raise FieldError(
                    self.limit_field,
                    f"{self.limit_field} is {most} and the prompt has {num_prompt} tokens, together more than the "
                    f"{longest} of this model's context. Ask for at most {room}, or leave {self.limit_field} out.",
                    "context_length_exceeded",
                )

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
