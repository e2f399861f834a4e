"""Offline inference, as vLLM's `LLM` class offers it."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from transfuse.config import engine_config, shorten_thread_waits
from transfuse.errors import EngineClosedError, EngineError, RequestError
from transfuse.explanation import Implementation
from transfuse.front.tasks import task_of, wrong_task
from transfuse.models.resolve import resolve_model
from transfuse.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from transfuse.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transfuse.front.front import Front
    from transfuse.front.pooling import PoolingFront
    from transfuse.front.prompts import Prompt
    from transfuse.front.texts import ReadText
    from transfuse.fusion.plan import FusionPlan
    from transfuse.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and the engine that runs it, in this process.

    Args:
        model: folder, hub id or `.gguf` file; None fetches a small default model once.
        tokenizer: folder or hub id of another tokenizer than the model's own.
        runner: `generate` to continue texts, `pooling` to make embeddings or scores of them, `auto` for what the
            model's files say.
        model_impl: `auto` takes the best implementation that is proved right; `fused`, `plain` and `original` insist.
        dtype: of weights and activations: `auto` (the checkpoint's), `bfloat16`, `float32`, `float16`.
        max_model_len: most tokens of a request, prompt and output; None takes the model's limit, or what fits.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step; measured speed may set a lower ceiling.
        block_size: tokens in a block of the paged cache.
        kv_cache_memory_bytes: bytes of the paged cache; None sizes it from the memory that is free.
        num_kv_blocks: blocks of the paged cache, instead of bytes; for experiments.
        enable_prefix_caching: share cache blocks between equal prefixes.
        enable_chunked_prefill: compute long prompts over several steps.
        scheduling_policy: `fcfs`, or `priority` to serve lower priorities first.
        trust_remote_code: let Python code in the model's folder run.
        trust_plan: skip the check that comes before a model's code runs batched.
        revision: branch, tag or commit of a hub id.
        cache_dir: where the default model, compiled kernels, verdicts and programs are kept.
        num_threads: CPU threads; None leaves torch's choice.
        seed: makes requests without a seed of their own repeatable.
        show_progress: whether loading shows a progress bar.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: the model cannot be found, loaded or run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | None = None,
        runner: str = "auto",
        model_impl: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        num_kv_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        trust_remote_code: bool = False,
        trust_plan: bool = False,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
        seed: int | None = None,
        show_progress: bool = True,
    ) -> None:
        config = engine_config(
            model,
            tokenizer=tokenizer,
            runner=runner,
            model_impl=model_impl,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            trust_remote_code=trust_remote_code,
            trust_plan=trust_plan,
            revision=revision,
            cache_dir=cache_dir,
            num_threads=num_threads,
            seed=seed,
        )
        # A wrong name is found out before torch and Transformers are imported, which takes seconds.
        source = resolve_model(
            config.model.model,
            cache_dir=config.model.cache_dir,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        shorten_thread_waits()
        from transfuse.engine.build import build_any
        from transfuse.engine.core import EngineCore
        from transfuse.front.front import Front
        from transfuse.front.pooling import PoolingFront

        self._built = build_any(config, source, show_progress=show_progress)
        # What exists now lives as long as the engine: looking through it for garbage would take 1% of every step.
        gc.collect()
        gc.freeze()
        core, limits = self._built.core, self._built.limits
        # One of the two is there, as the model does.
        self._generating: Front | None = None
        self._pooling: PoolingFront | None = None
        if isinstance(core, EngineCore):
            self._generating = Front(core, self._built.tokenizer, limits, seed)
            self._generating.implementation = Implementation.of(self.summary())
            self._check_grammar = core.check_grammar
        else:
            self._pooling = PoolingFront(core, self._built.tokenizer, limits)
        self._closed = False
        # The engine is synchronous: other threads wait for their turn, and the thread whose turn it is must not wait
        # for itself.
        self._turn = threading.Lock()
        self._turn_of: int | None = None

    @property
    def _front(self) -> Front:
        if self._generating is None:
            raise wrong_task(self._built.limits, "to generate text")
        return self._generating

    @property
    def _pooling_front(self) -> PoolingFront:
        if self._pooling is None:
            raise wrong_task(self._built.limits, "to embed or to score texts")
        return self._pooling

    @property
    def task(self) -> str:
        """What the model does: `generate`, `embed` or `score`."""
        return task_of(self._built.limits)

    @property
    def model_impl(self) -> str:
        """What runs: `fused`, `plain` or `original`."""
        return self._built.summary.implementation

    @property
    def model_impl_reason(self) -> str:
        """Why it runs this way."""
        return self._built.summary.reason

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """What was fused and what was not, and why; None where `model_impl` is not `fused`."""
        return self._built.plan

    def summary(self) -> dict[str, Any]:
        """What a start-up table shows; see `transfuse.engine.build.Summary`."""
        return dataclasses.asdict(self._built.summary)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._built.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one or a list of: text, `{"prompt": text}`, `{"prompt_token_ids": [ids]}`.
            sampling_params: one for all, or one for each; None for the defaults.
            use_tqdm: whether to show progress on stderr.
            priority: one for each prompt, lower first; only for `scheduling_policy="priority"`.

        Returns:
            An answer for each prompt, in order. One whose model computation failed carries `error`.

        Raises:
            RequestError: a prompt or its parameters can never be served; nothing was started.
        """
        single = isinstance(prompts, str | Mapping)
        items: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item,assignment]
        params = _one_for_each("sampling_params", _or_default(sampling_params), len(items))
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(items))
        for one in priorities:
            if isinstance(one, bool) or not isinstance(one, int):
                raise RequestError(f"priority holds {one!r}; expected integers.")
        with self._exclusive():
            tokenised = []
            for index, (prompt, one) in enumerate(zip(items, params, strict=True)):
                with _naming_prompt(index, len(items)):
                    tokenised.append(self._front.prompts.tokenise(prompt))
                    self._check(tokenised[-1][1], one)
            return self._run(tokenised, params, priorities, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue conversations by the model's chat template.

        Args:
            messages: one conversation or several, each a list of `{"role": ..., "content": ...}`.
            sampling_params: one for all, or one for each; None for the defaults.
            use_tqdm: whether to show progress on stderr.
            add_generation_prompt: whether to open the assistant's answer.
            chat_template_kwargs: variables for the template.

        Returns:
            An answer for each conversation, in order.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = [messages] if single else messages  # type: ignore[list-item,assignment]
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming_prompt(index, len(conversations)):
                prompts.append(self._chat_prompt(conversation, add_generation_prompt, chat_template_kwargs))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt and yield the answer so far after every step.

        The same object is yielded each time. Leaving the iterator early ends the request.

        Raises:
            RequestError: the request can never be served.
        """
        with self._exclusive():
            text, ids = self._front.prompts.tokenise(prompt)
            params = _or_default(sampling_params)
            self._check(ids, params)
            answer = self._front.submit(text, ids, params, arrival_time=_now())
            try:
                finished = False
                while not finished:
                    self._check_open()
                    outputs = self._step()
                    finished = answer.finished  # closing ends it too, while it is yielded
                    yield from outputs
            finally:
                self._front.abort(answer.request_id)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue one conversation and yield the answer so far after every step; see `stream` and `chat`."""
        return self.stream(self._chat_prompt(messages, True, chat_template_kwargs), sampling_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make vectors of texts.

        Args:
            prompts: one or a list of: text, `{"prompt": text}`, `{"prompt_token_ids": [ids]}`.
            use_tqdm: whether to show progress on stderr.
            truncate_prompt_tokens: tokens that are kept of what is longer, -1 for as many as the model takes; None to
                refuse it.
            dimensions: numbers that vectors are cut to, where the model's config declares that they may be.
            prompt_name: which of the model's own prompts is put before a text; None for its default, if it has one.

        Returns:
            A vector for each text, in order, as `outputs.embedding`. One whose computation failed carries `error`.

        Raises:
            RequestError: a text can never be served, or the model makes no vectors; nothing was started.
        """
        items: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        front = self._pooling_front
        with self._exclusive():
            front.texts.check_dimensions(dimensions)
            texts = []
            for index, prompt in enumerate(items):
                with _naming_prompt(index, len(items)):
                    texts.append(front.texts.read(prompt, prompt_name=prompt_name, truncate=truncate_prompt_tokens))
            return self._pool(texts, use_tqdm, dimensions)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Say how well documents answer a query: by a classifier that reads both, or by comparing their vectors.

        Args:
            query: one for all documents, or one for each. A model with prompts named `query` and `document` gets them.
            documents: one or several.
            use_tqdm: whether to show progress on stderr.
            truncate_prompt_tokens: see `embed`.

        Returns:
            A score for each document, in order, as `outputs.score`.

        Raises:
            RequestError: a text can never be served, or the model does not score; nothing was started.
        """
        from transfuse.front.pooling import Scoring
        from transfuse.front.texts import as_list, pair_up

        queries, others = as_list("query", query), as_list("documents", documents)
        front = self._pooling_front
        with self._exclusive():
            scoring = Scoring(front.texts, queries, others, pair_up(queries, others), truncate_prompt_tokens)
            return scoring.results(self._pool(scoring.needed, use_tqdm))

    def _pool(
        self, texts: Sequence[ReadText], use_tqdm: bool, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        front, arrival = self._pooling_front, _now()
        try:
            outputs = [front.submit(text, dimensions=dimensions, arrival_time=arrival) for text in texts]
            with tqdm(total=len(outputs), desc="Processed texts", disable=not use_tqdm) as bar:
                while front.num_unfinished:
                    bar.update(len(front.take(self._built.core.step().updates)))
        finally:
            # Also where the caller interrupts: nothing of this call may run on in the next.
            front.abort_all()
        return outputs

    def _check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._front.prompts.check(token_ids, params)
        if params.structured_outputs is not None:
            self._check_grammar(params.structured_outputs)

    def _chat_prompt(
        self, messages: Messages, add_generation_prompt: bool, kwargs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if self._generating is None:
            raise wrong_task(self._built.limits, "to generate text")
        ids = self._built.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )
        return {"prompt_token_ids": ids}

    def _run(
        self,
        tokenised: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        answers: list[RequestOutput] = []
        arrival = _now()
        try:
            for index, (text, token_ids) in enumerate(tokenised):
                with _naming_prompt(index, len(tokenised)):
                    answers.append(
                        self._front.submit(
                            text, token_ids, params[index], priority=priorities[index], arrival_time=arrival
                        )
                    )
            with tqdm(total=len(answers), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self._front.num_unfinished:
                    bar.update(sum(output.finished for output in self._step()))
        finally:
            # Also where the caller interrupts: nothing of this call may run on in the next.
            self._front.abort_all()
        return answers

    def _step(self) -> list[RequestOutput]:
        """One step of the engine; the answers that it changed."""
        return self._front.take(self._built.core.step().updates)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Within it, no other call runs the engine."""
        if self._turn_of == threading.get_ident():
            raise EngineError("A stream of this LLM is still open; read it to its end or close() it first.")
        with self._turn:
            self._check_open()
            self._turn_of = threading.get_ident()
            try:
                yield
            finally:
                self._turn_of = None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("This LLM is closed; make a new one.")

    def close(self) -> None:
        """Free the model and end its threads. A stream that is still open ends; closing twice is fine."""
        waits = self._turn_of != threading.get_ident()
        with self._turn if waits else nullcontext():
            if not self._closed:
                self._closed = True
                for front in (self._generating, self._pooling):
                    if front is not None:
                        front.abort_all()
                self._built.core.close()
                gc.unfreeze()

    def __enter__(self) -> LLM:
        """The engine itself; `close` is called at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _now() -> float:
    return time.monotonic()


def _or_default(sampling_params: Any) -> Any:
    return SamplingParams() if sampling_params is None else sampling_params


def _one_for_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each.")
    return list(value)


@contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Within it, a request's error says which prompt of a list it is about."""
    try:
        yield
    except RequestError as error:
        if count > 1:
            error.add_note(f"(prompt {index} of {count})")
        raise
