"""Puts the engine of a pooling model together: model, way of running it, pooling, queue."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from transfuse.config import EngineConfig
from transfuse.engine.build import Summary
from transfuse.engine.kernel_progress import compiling_shown
from transfuse.engine.module_start import model_max_len
from transfuse.engine.pooling.choice import TextChoice, choose_forward, layers_of
from transfuse.engine.pooling.core import Finish, PoolingCore
from transfuse.engine.pooling.forward import PackedForward, Text, TextForward
from transfuse.engine.pooling.pooler import Pooler, activation_of
from transfuse.engine.pooling.request import PoolingRequest
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import ConfigError, UnsupportedModelError, WeightsError
from transfuse.fusion.analysis import analyse_packed
from transfuse.fusion.plan import FusionPlan
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.messages import ModelLimits, Pooling
from transfuse.models.loader import LoadedModel, load_model
from transfuse.models.pooling_files import (
    PoolingRule,
    classifier_activation,
    matryoshka_dims,
    read_config,
    read_pooling_rule,
)
from transfuse.models.resolve import ModelSource
from transfuse.models.tokenizer import load_tokenizer
from transfuse.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A step of fewer tokens costs nearly as much as this one, however slow the machine is.
_MIN_BUDGET = 64


@dataclass(frozen=True, slots=True)
class BuiltPooling:
    """An engine ready to run, with what belongs to it.

    Attributes:
        core: the engine.
        limits: of the model.
        tokenizer: of the model.
        summary: what a start-up table shows.
        plan: what was fused; None where nothing was.
    """

    core: PoolingCore
    limits: ModelLimits
    tokenizer: Tokenizer
    summary: Summary
    plan: FusionPlan | None


def build_pooling(config: EngineConfig, source: ModelSource, *, scores: bool, show_progress: bool) -> BuiltPooling:
    """Load a model that makes something of whole texts, and all that runs it.

    Args:
        config: of the engine.
        source: a folder.
        scores: whether the model scores pairs of texts, rather than giving vectors.
        show_progress: whether loading shows progress bars.

    Raises:
        ModelError: the model cannot be loaded or run.
        ConfigError: a setting contradicts the model.
    """
    model_config = config.model
    loaded = load_model(
        source,
        dtype=model_config.dtype,
        trust_remote_code=model_config.trust_remote_code,
        show_progress=show_progress,
        analyse=analyse_packed if model_config.may_fuse else None,
        part=partial(layers_of, is_classifier=scores),
        head="classifier" if scores else "none",
    )
    tokenizer = load_tokenizer(source, model_config.tokenizer, model_config.trust_remote_code)
    if model_config.may_fuse:
        with compiling_shown(show_progress) as progress:
            load_kernels(cache_dir=model_config.cache_dir, progress=progress)
    choice = choose_forward(loaded.module, loaded.analysis, asked=model_config.model_impl, is_classifier=scores)
    vocab_size = loaded.config.get_text_config().vocab_size
    if isinstance(choice.forward, PackedForward) and choice.plan is not None:
        choice.forward.make_program(vocab_size)
    rule = read_pooling_rule(source.path)
    _check_filled(choice.forward, loaded, vocab_size)
    if not (scores or rule.modes):
        rule = replace(rule, modes=("mean" if _sees_ahead(choice.forward, vocab_size) else "lasttoken",))
    finish, words = _scorer(loaded) if scores else _embedder(rule)
    limits = ModelLimits(
        max_model_len=_max_len(config, loaded, rule, choice.padding_id),
        vocab_size=vocab_size,
        pooling=_pooling(loaded, rule, _dimension(choice.forward, finish, vocab_size), scores=scores),
    )
    ceiling = config.max_num_batched_tokens
    core = PoolingCore(
        choice.forward,
        finish,
        limits,
        config.max_num_seqs,
        StepBudget(ceiling, min(ceiling, max(config.max_num_seqs, _MIN_BUDGET))),
        by_priority=config.policy == "priority",
    )
    summary = _summary(config, source, loaded, limits, choice, words)
    log.info("%s", summary)
    return BuiltPooling(core, limits, tokenizer, summary, choice.plan)


def _summary(
    config: EngineConfig, source: ModelSource, loaded: LoadedModel, limits: ModelLimits, choice: TextChoice, words: str
) -> Summary:
    assert limits.pooling is not None
    forward, plan = choice.forward, choice.plan
    return Summary(
        model=source.name,
        task=limits.pooling.task,
        implementation=forward.implementation,
        reason=choice.reason,
        dtype=str(loaded.module.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in loaded.module.parameters()),
        weight_bytes=loaded.num_bytes,
        saved_weight_bytes=forward.saved_weight_bytes,
        max_model_len=limits.max_model_len,
        max_num_seqs=config.max_num_seqs,
        cache_tokens=None,
        cache_bytes=0,
        full_requests=0.0,
        prefix_caching=False,
        num_threads=torch.get_num_threads(),
        kernels=forward.kernels,
        load_seconds=loaded.load_seconds,
        num_linears=None if plan is None else plan.num_linears,
        num_fused_linears=None if plan is None else plan.num_fused_linears,
        analysis_seconds=loaded.analysis_seconds,
        pooling=words,
    )


def _embedder(rule: PoolingRule) -> tuple[Finish, str]:
    pooler = Pooler(rule)

    def finish(hidden: torch.Tensor, request: PoolingRequest) -> torch.Tensor:
        return pooler(hidden, request.num_skipped, request.dimensions)

    steps = [" and ".join(rule.modes), *("dense" for _ in rule.layers), *(["normalised"] if rule.normalises else [])]
    return finish, f"{', '.join(steps)}: {rule.origin}"


def _scorer(loaded: LoadedModel) -> tuple[Finish, str]:
    if loaded.config.num_labels != 1:
        raise UnsupportedModelError(
            f"{loaded.source.path} is a classifier of {loaded.config.num_labels} labels; only those of one "
            "label, which score how well two texts go together, are served."
        )
    name = classifier_activation(read_config(loaded.source.path))
    activation = activation_of(name)

    def finish(logits: torch.Tensor, request: PoolingRequest) -> torch.Tensor:
        score: torch.Tensor = activation(logits.float()).reshape(1)
        return score

    return finish, f"{name} of the classifier's logit"


def _check_filled(forward: TextForward, loaded: LoadedModel, vocab_size: int) -> None:
    """Refuse a checkpoint that lacks what the model computes with."""
    if loaded.unfilled and not bool(torch.isfinite(forward.run([_text(vocab_size, 3)])[0]).all()):
        raise WeightsError(
            f"The weights in {loaded.source.path} lack {', '.join(loaded.unfilled[:20])}. Check that config and "
            "weights belong together.",
            missing=loaded.unfilled,
        )


def _sees_ahead(forward: TextForward, vocab_size: int) -> bool:
    """Whether the first token of a text knows what comes after it."""
    one, other = _text(vocab_size, 2), _text(vocab_size, 3)
    first, second = (forward.run([text])[0][0].float().clone() for text in (one, other))
    return bool((first - second).abs().max() > 1e-2 * first.std())


def _dimension(forward: TextForward, finish: Finish, vocab_size: int) -> int:
    text = _text(vocab_size, 1)
    request = PoolingRequest(request_id="", token_ids=list(text.token_ids), type_ids=[0], arrival_time=0.0)
    return len(finish(forward.run([text])[0], request))


def _text(vocab_size: int, num_tokens: int) -> Text:
    return Text([(vocab_size // 3 + 7 * index) % vocab_size for index in range(num_tokens)], [0] * num_tokens)


def _max_len(config: EngineConfig, loaded: LoadedModel, rule: PoolingRule, padding_id: int | None) -> int:
    """Most tokens of a text: what is asked for, what the folder says, or what the model was made for."""
    # Where the count begins after the number of the padding token, that many positions are never used.
    most = model_max_len(loaded.config) - (0 if padding_id is None else padding_id + 1)
    asked = config.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(f"max_model_len is {asked}; the model was made for texts of at most {most} tokens. Lower it.")
    return asked or min(most, rule.max_len or most)


def _pooling(loaded: LoadedModel, rule: PoolingRule, dimension: int, *, scores: bool) -> Pooling:
    return Pooling(
        task="score" if scores else "embed",
        dimension=dimension,
        dimensions=None if scores else matryoshka_dims(read_config(loaded.source.path)),
        prompts=dict(rule.prompts),
        default_prompt=rule.default_prompt,
        includes_prompt=rule.includes_prompt,
        lowers_case=rule.lowers_case,
        similarity=rule.similarity,
    )
