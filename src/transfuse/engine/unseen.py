"""Checks code that was not seen before: does a model give the same logits in a ragged batch as on its own?

A ragged row is right only if nothing but attention mixes its tokens, and nobody can read that off a class name. So a
small random instance of the model is run both ways, once per source, config and versions, and the verdict kept. Where
the model is to be fused, the instance is analysed and fused like the model, so that one comparison shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from transfuse.config import SchedulerConfig
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.request import Request
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.verdicts import Verdict, keep_verdict, kept_verdict, verdict_path, where
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.fingerprint import own_source
from transfuse.kernels.cpu.loading import kernels_key
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.models.shrink import build_shrunk
from transfuse.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Raise when the check itself changes, so that old verdicts are not trusted.
CHECK_VERSION = 6

# Longer than the windows of a shrunk config, of unlike lengths, one of a single token.
_PROMPT_LENGTHS = (23, 5, 1, 14)
_NUM_NEW_TOKENS = 4
_BLOCK_SIZE = 4
# Of the logits' standard deviation. Float32 noise is near 1e-6; a fault moves logits by far more.
_TOLERANCE = 1e-3
# A loaded model may be in bfloat16, whose noise reaches single logits; their mean is compared instead.
_TOLERANCE_LOW_PRECISION = 0.05


@dataclass(frozen=True, slots=True)
class _Scenario:
    name: str
    max_num_seqs: int
    token_budget: int


_SCENARIOS = (
    _Scenario("alone", 1, 64),
    _Scenario("packed between others", 4, 64),
    _Scenario("in chunks", 4, 6),
)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A prompt, how the original continues it, and its logits [_NUM_NEW_TOKENS, V] for each new token."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


_Compare = Callable[[PreTrainedModel, Sequence[_Reference], str], Verdict]


def check_model(model: PreTrainedModel, cache_dir: Path) -> Verdict:
    """Whether `plain` may serve `model`'s source, config and versions, from `cache_dir` or found now and kept there."""
    return _kept_or_found(plain_verdict_path(model, cache_dir), lambda: _check(model))


def check_fused(model: PreTrainedModel, cache_dir: Path) -> Verdict:
    """Whether `fused` may serve it, and which of its modules have to stay as they are; see `check_model`."""
    return _kept_or_found(fused_verdict_path(model, cache_dir), lambda: _check(model, _compare_fused))


def plain_verdict_path(model: PreTrainedModel, cache_dir: Path) -> Path:
    """Where the verdict of `check_model` is kept."""
    return verdict_path(model, cache_dir, CHECK_VERSION)


def fused_verdict_path(model: PreTrainedModel, cache_dir: Path) -> Path:
    """Where the verdict of `check_fused` is kept."""
    return verdict_path(model, cache_dir, CHECK_VERSION, "fused", own_source(), kernels_key(cache_dir))


def _kept_or_found(path: Path, find: Callable[[], Verdict]) -> Verdict:
    verdict = kept_verdict(path)
    if verdict is None:
        verdict = find()
        keep_verdict(path, verdict)
    return verdict


def _compare_plain(model: PreTrainedModel, reference: Sequence[_Reference], checked_on: str) -> Verdict:
    return _compare(lambda: PlainRunner(model), reference, checked_on)


def _compare_fused(model: PreTrainedModel, reference: Sequence[_Reference], checked_on: str) -> Verdict:
    """Compare the model with all fused; where that is wrong, find the classes that may not be.

    They are fused one by one, each on top of those that were right before.
    """
    whole = analyse_model(model)

    def compare(refused: dict[str, str]) -> Verdict:
        return _compare(lambda: FusedRunner(model, whole.without(refused)), reference, checked_on)

    verdict = compare({})
    if verdict.passed:
        return verdict
    plain = _compare_plain(model, reference, checked_on)
    if not plain.passed:
        return plain
    names = list(dict.fromkeys(kind.plan.module_class for kind in whole.kinds if kind.fused_class is not None))
    refused = dict.fromkeys(names, "not tried")
    for name in names:
        found = compare({other: reason for other, reason in refused.items() if other != name})
        if found.passed:
            del refused[name]
        else:
            refused[name] = found.reason
    if len(refused) == len(names):
        which = f" with any of {', '.join(names)} fused" if names else ""
        return Verdict(False, f"{verdict.reason}{which}", checked_on, refused)
    last = compare(refused)
    return Verdict(last.passed, last.reason, checked_on, refused)


def _check(model: PreTrainedModel, compare: _Compare = _compare_plain) -> Verdict:
    try:
        ForwardArguments.of(type(model))
    except UnsupportedModelError as error:
        return Verdict(False, str(error), "signature")
    for keeps_depth in (False, True):
        try:
            small = build_shrunk(type(model), model.config, keeps_depth=keeps_depth)
            reference = _reference(small)
        except UnsupportedModelError as error:
            return Verdict(False, str(error), "shrunk")
        except Exception as error:
            extent = "without fewer layers" if keeps_depth else "to fewer layers"
            log.info("%s cannot be shrunk %s: %s", type(model).__name__, extent, where(error))
        else:
            return compare(small, reference, "shrunk")
    try:
        reference = _reference(model)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), "loaded")
    except Exception as error:
        return Verdict(False, f"the original cannot be run for comparison: {where(error)}", "loaded")
    return compare(model, reference, "loaded")


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENGTHS]


def _reference(model: PreTrainedModel) -> list[_Reference]:
    """What the original gives.

    Raises:
        UnsupportedModelError: the model's own code rules out ragged batches, which shows sooner than numbers would.
        Exception: the original cannot be run.
    """
    try:
        PlainRunner(model).close()
    except UnsupportedModelError:
        raise
    except Exception as error:
        # The comparison meets it again, unless the original fails too.
        log.debug("the ragged forward of %s fails: %s", type(model).__name__, where(error))
    return [_original(model, prompt) for prompt in _prompts(model)]


@torch.inference_mode()
def _original(model: PreTrainedModel, prompt: list[int]) -> _Reference:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            max_new_tokens=_NUM_NEW_TOKENS,
            min_new_tokens=_NUM_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        ),
    )
    return _Reference(prompt, result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float())


def _compare(make: Callable[[], PlainRunner], reference: Sequence[_Reference], checked_on: str) -> Verdict:
    on = "a shrunk instance" if checked_on == "shrunk" else "the loaded model (its config cannot be shrunk)"
    try:
        with closing(make()) as runner:
            num_blocks = _allocate(runner, reference)
            for scenario in _SCENARIOS:
                found = _ragged_logits(runner, reference, scenario, num_blocks)
                if not _error(found, reference, runner.model.dtype) <= 1.0:
                    found_wrong = f"logits of {on} differ when run {scenario.name}"
                    return Verdict(False, _after(runner.row_refusal, found_wrong), checked_on)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), checked_on)
    except Exception as error:
        return Verdict(False, f"the ragged forward of {on} fails: {where(error)}", checked_on)
    return Verdict(True, f"checked against the original on {on}: alone, packed and in chunks", checked_on)


def _after(row_refusal: str, reason: str) -> str:
    """What is wrong where requests run by themselves comes after why they do."""
    return f"{row_refusal}; and request by request {reason}" if row_refusal else reason


def _error(found: Sequence[torch.Tensor], reference: Sequence[_Reference], dtype: torch.dtype) -> float:
    """The largest difference, as a share of what is tolerated in this dtype; NaN where either side is not finite."""
    expected = torch.cat([r.logits for r in reference])
    difference = (torch.cat(list(found)).float() - expected).abs()
    scale = expected.std()
    if dtype == torch.float32:
        return float(difference.max() / (scale * _TOLERANCE))
    return float(difference.mean() / (scale * _TOLERANCE_LOW_PRECISION))


def _allocate(runner: PlainRunner, reference: Sequence[_Reference]) -> int:
    """Give the runner room for all prompts at once; the number of blocks."""
    per_group = sum(-(-(len(r.prompt) + len(r.tokens)) // _BLOCK_SIZE) for r in reference)
    # A model that keeps states only has no group, and the scheduler a pool that nobody asks.
    num_blocks = 1 + max(1, per_group * len(runner.groups))
    runner.allocate_states(len(reference))
    runner.allocate(num_blocks, _BLOCK_SIZE)
    return num_blocks


def _ragged_logits(
    runner: PlainRunner, reference: Sequence[_Reference], scenario: _Scenario, num_blocks: int
) -> list[torch.Tensor]:
    """Logits [_NUM_NEW_TOKENS, V] of each prompt in ragged batches, fed the reference's tokens."""
    config = SchedulerConfig(
        max_model_len=max(_PROMPT_LENGTHS) + _NUM_NEW_TOKENS,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        block_size=_BLOCK_SIZE,
        keeps_states=runner.bytes_per_state > 0,
    )
    scheduler = Scheduler(config, runner.groups, num_blocks)
    by_id = {str(index): r for index, r in enumerate(reference)}
    rows: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in by_id}
    for request_id, r in by_id.items():
        scheduler.add(_request(request_id, r))
    while scheduler.has_unfinished:
        batch = scheduler.schedule(scenario.token_budget)
        result = runner.run(batch)
        sampled = {}
        for request, logits in zip(result.sampling, result.logits, strict=True):
            rows[request.request_id].append(logits.clone())
            sampled[request.request_id] = by_id[request.request_id].tokens[len(request.output_token_ids)]
        scheduler.update(batch, sampled)
    return [torch.stack(rows[request_id]) for request_id in by_id]


def _request(request_id: str, reference: _Reference) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=reference.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=len(reference.tokens), ignore_eos=True),
        max_tokens=len(reference.tokens),
        arrival_time=0.0,
    )
