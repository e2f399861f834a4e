"""Puts an engine together: model, implementation, cache, scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transfuse.config import EngineConfig, SchedulerConfig
from transfuse.engine.choice import Choice, choose, is_analysed
from transfuse.engine.core import EngineCore
from transfuse.engine.engine import Engine
from transfuse.engine.runner import ModelRunner
from transfuse.engine.sampler import Sampler
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.sizing import CacheSize, size_cache
from transfuse.engine.step_budget import StepBudget
from transfuse.fusion.plan import FusionPlan
from transfuse.messages import ModelLimits
from transfuse.models.loader import LoadedModel, load_model
from transfuse.models.resolve import ModelSource
from transfuse.models.tokenizer import load_tokenizer
from transfuse.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

# Where a config does not say how long its texts may be.
_FALLBACK_MAX_LEN = 2048
# A step of fewer tokens costs nearly as much as this one, however slow the machine is.
_MIN_BUDGET = 64


@dataclass(frozen=True, slots=True)
class Summary:
    """What a start-up table shows.

    Attributes:
        model: its name.
        implementation: `fused`, `plain` or `original`.
        reason: why this implementation.
        dtype: of weights and activations.
        num_parameters: tied ones counted once.
        weight_bytes: bytes of the weights.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests in a step.
        cache_tokens: tokens that the cache holds; None where the model keeps a cache of its own.
        cache_bytes: bytes of the cache when full.
        full_requests: requests of full length that the cache holds at once.
        prefix_caching: whether requests share equal prefixes.
        num_threads: threads that compute.
        load_seconds: time to load the weights.
        num_linears: linear layers that a forward calls; None where it is not fused.
        num_fused_linears: of those, the ones that run in fused ops.
        analysis_seconds: time to find out what can be fused.
    """

    model: str
    implementation: str
    reason: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    cache_tokens: int | None
    cache_bytes: int
    full_requests: float
    prefix_caching: bool
    num_threads: int
    load_seconds: float
    num_linears: int | None
    num_fused_linears: int | None
    analysis_seconds: float


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

    Raises:
        ModelError: the model cannot be loaded or run.
        ConfigError: settings contradict each other, the model or the memory.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_config = config.model
    loaded = load_model(
        source,
        dtype=model_config.dtype,
        trust_remote_code=model_config.trust_remote_code,
        show_progress=show_progress,
        analyse=is_analysed(model_config),
    )
    tokenizer = load_tokenizer(source, model_config.tokenizer, model_config.trust_remote_code)
    choice = choose(loaded.module, loaded.analysis, model_config)
    try:
        return _assemble(config, loaded, tokenizer, choice)
    except BaseException:
        choice.runner.close()
        raise


def _assemble(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer, choice: Choice) -> BuiltEngine:
    cache, runner, plan = config.cache, choice.runner, choice.plan
    size = size_cache(
        cache,
        runner.groups,
        bytes_per_block=runner.bytes_per_block(cache.block_size),
        model_max_len=_model_max_len(loaded.config),
        max_model_len=config.max_model_len,
        max_num_seqs=runner.max_num_seqs or config.max_num_seqs,
        max_chunk=config.max_num_batched_tokens,
    )
    scheduler_config = _scheduler_config(config, runner, size)
    scheduler = Scheduler(scheduler_config, runner.groups, size.num_blocks)
    num_bytes = runner.allocate(size.num_blocks, cache.block_size)
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    ceiling = scheduler_config.max_num_batched_tokens
    # Without chunks a prompt goes in one step, however long it takes.
    floor = min(ceiling, max(scheduler_config.max_num_seqs, _MIN_BUDGET)) if runner.supports_chunks else ceiling
    budget = StepBudget(ceiling, floor)
    engine = Engine(runner, scheduler, Sampler(), budget)
    limits = ModelLimits(max_model_len=size.max_model_len, vocab_size=vocab_size)
    core = EngineCore(engine, limits, frozenset(tokenizer.eos_token_ids))
    summary = Summary(
        model=loaded.source.name,
        implementation=runner.implementation,
        reason=choice.reason,
        dtype=str(loaded.module.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in loaded.module.parameters()),
        weight_bytes=loaded.num_bytes,
        max_model_len=size.max_model_len,
        max_num_seqs=scheduler_config.max_num_seqs,
        cache_tokens=size.num_tokens if num_bytes else None,
        cache_bytes=num_bytes,
        full_requests=size.num_full_requests,
        prefix_caching=scheduler_config.enable_prefix_caching,
        num_threads=torch.get_num_threads(),
        load_seconds=loaded.load_seconds,
        num_linears=None if plan is None else plan.num_linears,
        num_fused_linears=None if plan is None else plan.num_fused_linears,
        analysis_seconds=loaded.analysis_seconds,
    )
    log.info("%s", summary)
    return BuiltEngine(core, limits, tokenizer, summary, plan)


def _scheduler_config(config: EngineConfig, runner: ModelRunner, size: CacheSize) -> SchedulerConfig:
    """What the caller asked for, as far as the implementation can do it."""
    return SchedulerConfig(
        max_model_len=size.max_model_len,
        max_num_seqs=runner.max_num_seqs or config.max_num_seqs,
        # An implementation without chunks computes a whole prompt, and a preempted request's output, in one step.
        max_num_batched_tokens=config.max_num_batched_tokens if runner.supports_chunks else size.max_model_len,
        policy=config.policy,
        enable_chunked_prefill=config.enable_chunked_prefill and runner.supports_chunks,
        enable_prefix_caching=config.cache.enable_prefix_caching and runner.supports_chunks,
        block_size=config.cache.block_size,
    )


def _model_max_len(config: PreTrainedConfig) -> int:
    """The longest text that the model was made for, in tokens."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "context_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    log.info("the config does not say how long a text may be; taking %d tokens", _FALLBACK_MAX_LEN)
    return _FALLBACK_MAX_LEN
