"""Puts an engine together: model, implementation, cache, scheduler."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transfuse.config import EngineConfig, ModelConfig, SchedulerConfig
from transfuse.engine.core import EngineCore
from transfuse.engine.engine import Engine
from transfuse.engine.grammars import Grammars
from transfuse.engine.program_store import ProgramStore, program_store
from transfuse.engine.ready_model import ReadyModel
from transfuse.engine.runner import ModelRunner
from transfuse.engine.sampler import Sampler
from transfuse.engine.sampling import SamplingKernels, sampling_kernels
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.sizing import CacheSize, size_cache
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import WrongTaskError
from transfuse.fusion.plan import FusionPlan
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.messages import ModelLimits
from transfuse.models.pooling_files import find_task
from transfuse.models.resolve import ModelSource
from transfuse.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transfuse.engine.pooling.build import BuiltPooling

log = logging.getLogger(__name__)

# A step of fewer tokens costs nearly as much as this one, however slow the machine is.
_MIN_BUDGET = 64


@dataclass(frozen=True, slots=True)
class Summary:
    """What a start-up table shows.

    Attributes:
        model: its name.
        task: `generate`, `embed` or `score`.
        implementation: `fused`, `plain` or `original`.
        reason: why this implementation.
        dtype: of weights and activations.
        num_parameters: tied ones counted once.
        weight_bytes: bytes of the weights in the model's files.
        saved_weight_bytes: by which coded exponents make them smaller in memory; so much less is read for a token.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests in a step.
        cache_tokens: tokens that the cache holds; None where the model keeps a cache of its own.
        cache_bytes: bytes of the cache when full.
        full_requests: requests of full length that the cache holds at once.
        prefix_caching: whether requests share equal prefixes.
        num_threads: threads that compute.
        kernels: the instructions that the compiled kernels use, or `torch` where torch's serve, and why.
        load_seconds: time to load the weights.
        num_linears: linear layers that a forward calls; None where it is not fused.
        num_fused_linears: of those, the ones that run in fused ops.
        analysis_seconds: time to find out what can be fused.
        pooling: how whole texts are pooled, and what says so; None where the model generates.
    """

    model: str
    task: str
    implementation: str
    reason: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    saved_weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    cache_tokens: int | None
    cache_bytes: int
    full_requests: float
    prefix_caching: bool
    num_threads: int
    kernels: str
    load_seconds: float
    num_linears: int | None
    num_fused_linears: int | None
    analysis_seconds: float
    pooling: str | None = None


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to run, with what belongs to it."""

    core: EngineCore
    limits: ModelLimits
    tokenizer: Tokenizer
    summary: Summary
    plan: FusionPlan | None


def build_engine(config: EngineConfig, source: ModelSource, *, show_progress: bool) -> BuiltEngine:
    """Load a model and make everything that runs it.

    Where an earlier start has stored what the model computes, neither its modules nor Transformers are loaded.

    Raises:
        ModelError: the model cannot be loaded or run.
        ConfigError: settings contradict each other, the model or the memory.
        WrongTaskError: the model does not generate.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    task = find_task(source, config.model.runner)
    if task != "generate":
        raise WrongTaskError(
            f"{source.name} makes embeddings or scores of texts; here a model is needed that generates."
        )
    kept = program_store(config, source)
    with nullcontext() if kept is None else closing(kept):
        ready = None if kept is None else kept.start()
        if ready is not None:
            return _assembled(config, source, ready)
        return _build_from_modules(config, source, kept, show_progress)


def build_any(config: EngineConfig, source: ModelSource, *, show_progress: bool) -> BuiltEngine | BuiltPooling:
    """Load a model and make everything that runs it, for what it does; see `build_engine`."""
    task = find_task(source, config.model.runner)
    if task == "generate":
        return build_engine(config, source, show_progress=show_progress)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    # It loads Transformers, too.
    from transfuse.engine.pooling.build import build_pooling

    return build_pooling(config, source, scores=task == "score", show_progress=show_progress)


def _build_from_modules(
    config: EngineConfig, source: ModelSource, kept: ProgramStore | None, show_progress: bool
) -> BuiltEngine:
    # They load Transformers, which takes seconds.
    from transfuse.engine.fused_runner import FusedRunner
    from transfuse.engine.module_start import start_modules

    ready, loaded = start_modules(config.model, source, show_progress=show_progress)
    runner = ready.runner
    if kept is None or not isinstance(runner, FusedRunner) or not runner.supports_chunks:
        return _assembled(config, source, ready)
    kept.watch(runner, loaded)
    built = _assembled(config, source, ready)
    kept.keep(ready, runner, loaded)
    return built


def _assembled(config: EngineConfig, source: ModelSource, ready: ReadyModel) -> BuiltEngine:
    try:
        return _assemble(config, source, ready)
    except BaseException:
        ready.runner.close()
        raise


def _assemble(config: EngineConfig, source: ModelSource, ready: ReadyModel) -> BuiltEngine:
    cache, runner, plan, facts = config.cache, ready.runner, ready.plan, ready.facts
    size = size_cache(
        cache,
        runner.groups,
        bytes_per_block=runner.bytes_per_block(cache.block_size),
        bytes_per_state=runner.bytes_per_state,
        model_max_len=facts.max_len,
        max_model_len=config.max_model_len,
        max_num_seqs=min(config.max_num_seqs, runner.max_num_seqs or config.max_num_seqs),
        max_chunk=config.max_num_batched_tokens,
    )
    scheduler_config = _scheduler_config(config, runner, size)
    scheduler = Scheduler(scheduler_config, runner.groups, size.num_blocks)
    num_bytes = runner.allocate_states(size.max_num_seqs) + runner.allocate(size.num_blocks, cache.block_size)
    ceiling = scheduler_config.max_num_batched_tokens
    # Without chunks a prompt goes in one step, however long it takes.
    floor = min(ceiling, max(scheduler_config.max_num_seqs, _MIN_BUDGET)) if runner.supports_chunks else ceiling
    budget = StepBudget(ceiling, floor)
    engine = Engine(runner, scheduler, Sampler(_sampling_kernels(config.model), torch.get_num_threads()), budget)
    limits = ModelLimits(max_model_len=size.max_model_len, vocab_size=facts.vocab_size)
    grammars = Grammars(ready.tokenizer, facts.vocab_size)
    core = EngineCore(engine, limits, frozenset(ready.tokenizer.eos_token_ids), grammars)
    summary = Summary(
        model=source.name,
        task="generate",
        implementation=runner.implementation,
        reason=ready.reason,
        dtype=facts.dtype,
        num_parameters=facts.num_parameters,
        weight_bytes=facts.weight_bytes,
        saved_weight_bytes=0 if runner.executable is None else runner.executable.saved_weight_bytes,
        max_model_len=size.max_model_len,
        max_num_seqs=scheduler_config.max_num_seqs,
        cache_tokens=size.num_tokens if num_bytes else None,
        cache_bytes=num_bytes,
        full_requests=size.num_full_requests,
        prefix_caching=scheduler_config.enable_prefix_caching,
        num_threads=torch.get_num_threads(),
        kernels=runner.kernels,
        load_seconds=ready.load_seconds,
        num_linears=None if plan is None else plan.num_linears,
        num_fused_linears=None if plan is None else plan.num_fused_linears,
        analysis_seconds=ready.analysis_seconds,
    )
    log.info("%s", summary)
    return BuiltEngine(core, limits, ready.tokenizer, summary, plan)


def _sampling_kernels(config: ModelConfig) -> SamplingKernels:
    # The library that is loaded already; it is left out where torch's kernels were asked for.
    library = load_kernels(cache_dir=config.cache_dir).library if config.may_fuse else None
    return sampling_kernels(library, torch.get_num_threads())


def _scheduler_config(config: EngineConfig, runner: ModelRunner, size: CacheSize) -> SchedulerConfig:
    """What the caller asked for, as far as the implementation can do it."""
    return SchedulerConfig(
        max_model_len=size.max_model_len,
        max_num_seqs=size.max_num_seqs,
        # An implementation without chunks computes a whole prompt, and a preempted request's output, in one step.
        max_num_batched_tokens=config.max_num_batched_tokens
        if runner.supports_chunks
        else max(size.max_model_len, size.max_num_seqs),
        policy=config.policy,
        enable_chunked_prefill=config.enable_chunked_prefill and runner.supports_chunks,
        enable_prefix_caching=config.cache.enable_prefix_caching and runner.shares_prefixes,
        block_size=config.cache.block_size,
        keeps_states=runner.bytes_per_state > 0,
        replays_outputs=not runner.supports_chunks,
    )
