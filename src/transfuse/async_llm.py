"""Serving inference: the model in a process of its own, many callers at once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from transfuse.client.core_client import CoreClient
from transfuse.client.pooling_calls import PoolingCalls
from transfuse.client.watch import CoreState
from transfuse.config import EngineConfig, WatchConfig, engine_config
from transfuse.errors import EngineUnavailableError, TransfuseError
from transfuse.explanation import Implementation
from transfuse.front.front import Front
from transfuse.front.pooling import PoolingFront
from transfuse.front.prompts import Prompt
from transfuse.front.tasks import task_of, wrong_task
from transfuse.front.texts import as_list
from transfuse.fusion.plan import FusionPlan
from transfuse.messages import CoreStats, ModelLimits, Ready, StepReport
from transfuse.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from transfuse.sampling_params import SamplingParams
from transfuse.text.bounded_grammars import BoundedGrammars
from transfuse.text.bounded_templates import BoundedTemplates
from transfuse.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Longer texts are tokenised in a thread: this many characters take well below a millisecond.
_MAX_INLINE_CHARS = 1000


class AsyncLLM:
    """A model in another process, watched and restarted; `transfuse serve` without HTTP.

    Use: `async with AsyncLLM(model) as llm: async for answer in llm.generate(prompt): ...`. All methods belong to the
    event loop that `start` ran on.

    Args:
        model: folder, hub id or `.gguf` file; None fetches a small default model once. Or a whole `EngineConfig`.
        show_progress: whether loading shows a progress bar.
        watch: when the process counts as frozen, and how often it may die.
        **settings: the keyword arguments of `LLM`.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        show_progress: bool = True,
        watch: WatchConfig | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            if settings:
                raise TypeError(f"{', '.join(settings)}: give settings or an EngineConfig, not both.")
            self._config = model
        else:
            self._config = engine_config(model, **settings)
        self._client = CoreClient(
            self._config,
            watch or WatchConfig(),
            show_progress=show_progress,
            on_ready=self._take_ready,
            on_report=self._take_report,
            on_lost=self._lose,
        )
        # One of the two is there once the model is loaded, as it does.
        self._front: Front | None = None
        self._pooling_front: PoolingFront | None = None
        self._pooling = PoolingCalls(self._require_pooling)
        self._ready: Ready | None = None
        self._tokenizer: Tokenizer | None = None
        self._templates: BoundedTemplates | None = None
        self._grammars: BoundedGrammars | None = None
        self._stats = CoreStats()
        self._changed: dict[str, asyncio.Event] = {}  # by request: its answer has grown

    async def start(self) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            ConfigError: settings contradict each other, the model or the memory.
            ModelError: the model cannot be found, loaded or run.
            EngineError: the process died.
        """
        await self._client.start()

    async def close(self) -> None:
        """End the process. Requests that still run end with `EngineClosedError`; closing twice is fine."""
        try:
            await self._client.close()
        finally:
            await self._close_helpers()

    async def _close_helpers(self) -> None:
        for helper in (self._templates, self._grammars):
            if helper is not None:
                await helper.close()

    async def __aenter__(self) -> AsyncLLM:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    @property
    def state(self) -> CoreState:
        """`loading`, `ready`, `unresponsive`, `restarting`, `failed` or `closed`."""
        return self._client.state

    @property
    def reason(self) -> str:
        """Why it is not ready; empty where it is."""
        return self._client.reason

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._client.state == "ready"

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None while there is none."""
        return self._client.pid

    @property
    def summary(self) -> Mapping[str, Any]:
        """What a start-up table shows, as the last start found it; see `transfuse.engine.build.Summary`."""
        return self._last_ready().summary

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """What was fused and what was not, and why, as the last start found it; None where nothing runs `fused`."""
        plan = self._last_ready().fusion_plan
        return None if plan is None else FusionPlan.from_json(plan)

    @property
    def limits(self) -> ModelLimits:
        """What requests are checked against."""
        return self._last_ready().limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        self._last_ready()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def task(self) -> str:
        """What the model does: `generate`, `embed` or `score`."""
        return task_of(self.limits)

    @property
    def stats(self) -> CoreStats:
        """The core's numbers after its last step; of a new core they begin again."""
        return self._stats

    @property
    def num_restarts(self) -> int:
        """Times that the process with the model was started again after its end."""
        return self._client.num_restarts

    @property
    def num_unfinished(self) -> int:
        """Continuations, or texts to pool, under way."""
        fronts = (self._front, self._pooling_front)
        return sum(front.num_unfinished for front in fronts if front is not None)

    def _last_ready(self) -> Ready:
        if self._ready is None:
            raise EngineUnavailableError("The model is not loaded yet; await start() first.")
        return self._ready

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt and yield the answer so far whenever it has grown.

        The same object is yielded each time; a slow reader finds several steps in it at once. Closing the generator,
        or cancelling the task that reads it, ends the request. Where the model fails on it, or the process dies, the
        last answer carries `error`.

        Args:
            prompt: text, `{"prompt": text}` or `{"prompt_token_ids": [ids]}`.
            sampling_params: how to sample; None for the defaults.
            request_id: unique among unfinished requests; None makes one.
            priority: lower is served first; only for `scheduling_policy="priority"`.
            cache_salt: requests with different salts never share cache blocks.

        Raises:
            RequestError: the request can never be served.
            EngineUnavailableError: nothing is served now; `state` and `reason` say why.
            EngineClosedError: it was closed.
        """
        arrival = time.monotonic()
        self._client.check_ready()
        front = self._require_front()
        text, ids = await self._tokenise(front, prompt)
        params = SamplingParams() if sampling_params is None else sampling_params
        front.prompts.check(ids, params)
        check_seconds = await self._check_grammar(params)
        self._client.check_ready()
        front = self._require_front()
        output = front.submit(
            text,
            ids,
            params,
            request_id=request_id,
            priority=priority,
            salt=b"" if cache_salt is None else _salt(cache_salt),
            arrival_time=arrival,
        )
        assert output.metrics is not None, "a front measures"
        output.metrics.grammar_check_seconds = check_seconds
        changed = self._changed[output.request_id] = asyncio.Event()
        try:
            finished = False
            while not finished:
                await changed.wait()
                changed.clear()
                finished = output.finished  # it may finish while the reader is busy: then that is still to be yielded
                yield output
        finally:
            # What has finished may have left its name to another.
            if self._changed.get(output.request_id) is changed:
                del self._changed[output.request_id]
            if not output.finished:
                front.abort(output.request_id)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one conversation by the model's chat template; see `generate`.

        Args:
            messages: the conversation, a list of `{"role": ..., "content": ...}`.
            sampling_params: see `generate`.
            add_generation_prompt: whether to open the assistant's answer.
            chat_template_kwargs: variables for the template.
            request_id: see `generate`.
            priority: see `generate`.
            cache_salt: see `generate`.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        self._require_front()
        text = await self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})
        )
        # The template writes its own special tokens, the beginning-of-text one included.
        ids = await self.encode(text, add_special_tokens=False)
        answers = self.generate(
            {"prompt_token_ids": ids},
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            async for answer in answers:
                yield answer
        finally:
            await answers.aclose()

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        at_once: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make vectors of texts; cancelling the task that waits ends them.

        Args:
            prompts: see `LLM.embed`.
            truncate_prompt_tokens: see `LLM.embed`.
            dimensions: see `LLM.embed`.
            prompt_name: see `LLM.embed`.
            priority: lower is served first; only for `scheduling_policy="priority"`.
            at_once: texts of this call that are with the engine at one time; None for a few hundred.

        Returns:
            A vector for each text, in order, as `outputs.embedding`.

        Raises:
            RequestError: a text can never be served, or the model makes no vectors.
            EngineError: the engine failed on a text, is gone, or takes none now.
        """
        items: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return await self._pooling.embed(
            items,
            truncate=truncate_prompt_tokens,
            dimensions=dimensions,
            prompt_name=prompt_name,
            priority=priority,
            at_once=at_once,
        )

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        at_once: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Say how well documents answer a query; see `LLM.score` and `embed`."""
        return await self._pooling.score(
            as_list("query", query),
            as_list("documents", documents),
            truncate=truncate_prompt_tokens,
            priority=priority,
            at_once=at_once,
        )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            PromptError: the text is no valid Unicode.
        """
        if len(text) <= _MAX_INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The text of a conversation, laid out in a process that is bounded in time and memory.

        Args:
            messages: the conversation.
            **kwargs: `add_generation_prompt`, `chat_template`, `tools` and variables of the template.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        self._last_ready()
        assert self._templates is not None
        return await self._templates.render(messages, **kwargs)

    async def _tokenise(self, front: Front, prompt: Prompt) -> tuple[str | None, list[int]]:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _MAX_INLINE_CHARS:
            return await asyncio.to_thread(front.prompts.tokenise, prompt)
        return front.prompts.tokenise(prompt)

    async def _check_grammar(self, params: SamplingParams) -> float:
        """The seconds that it took to try out what the answer must be; 0 where it need be nothing."""
        if params.structured_outputs is None:
            return 0.0
        assert self._grammars is not None, "a core that is ready has them"
        start = time.monotonic()
        await self._grammars.check(params.structured_outputs)
        return time.monotonic() - start

    def _require_front(self) -> Front:
        if self._front is None:
            raise wrong_task(self.limits, "to generate text")
        return self._front

    def _require_pooling(self) -> PoolingFront:
        self._client.check_ready()
        if self._pooling_front is None:
            raise wrong_task(self.limits, "to embed or to score texts")
        return self._pooling_front

    async def _take_ready(self, ready: Ready) -> None:
        """A core has loaded the model, for the first time or again."""
        before = self._ready
        if self._tokenizer is None or before is None or ready.tokenizer != before.tokenizer:
            # Large vocabularies take half a second.
            self._tokenizer = await asyncio.to_thread(Tokenizer, ready.tokenizer)
            await self._close_helpers()
            self._templates = BoundedTemplates(ready.tokenizer.chat_templates, ready.tokenizer.special_tokens)
            self._grammars = BoundedGrammars(ready.tokenizer, ready.limits.vocab_size)
            before = None
        if before is None or ready.limits != before.limits:
            self._make_front(self._tokenizer, ready.limits)
        if self._front is not None:
            self._front.implementation = Implementation.of(ready.summary)
        self._ready = ready

    def _make_front(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        if limits.pooling is None:
            self._front, self._pooling_front = Front(self._client, tokenizer, limits, self._config.seed), None
        else:
            self._front, self._pooling_front = None, PoolingFront(self._client, tokenizer, limits)

    def _take_report(self, report: StepReport) -> None:
        self._stats = report.stats
        if self._pooling_front is not None:
            self._pooling.wake(self._pooling_front.take(report.updates))
        if self._front is not None:
            for output in self._front.take(report.updates):
                self._wake(output)

    def _lose(self, error: TransfuseError) -> None:
        self._stats = CoreStats()
        if self._front is not None:
            for output in self._front.fail_all(error):
                self._wake(output)
        if self._pooling_front is not None:
            self._pooling.wake(self._pooling_front.fail_all(error))

    def _wake(self, output: RequestOutput) -> None:
        if (changed := self._changed.get(output.request_id)) is not None:
            changed.set()


def _salt(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
