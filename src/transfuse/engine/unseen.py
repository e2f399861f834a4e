"""Checks code that was not seen before: does a model give the same logits in a ragged batch as on its own?

A ragged row is right only if nothing but attention mixes its tokens, and nobody can read that off a class name. So a
small random instance of the model is run both ways, once per source, config and versions, and the verdict kept.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from transfuse.config import SchedulerConfig
from transfuse.engine.plain_runner import ForwardArguments, PlainRunner
from transfuse.engine.request import Request
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.verdicts import Verdict, keep_verdict, kept_verdict, verdict_path
from transfuse.errors import UnsupportedModelError
from transfuse.models.shrink import build_shrunk
from transfuse.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Raise when the check itself changes, so that old verdicts are not trusted.
CHECK_VERSION = 2

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


def check_model(model: PreTrainedModel, cache_dir: Path) -> Verdict:
    """The verdict on `model`'s source, config and versions: from `cache_dir`, or found now and kept there."""
    path = verdict_path(model, cache_dir, CHECK_VERSION)
    verdict = kept_verdict(path)
    if verdict is None:
        verdict = _check(model)
        keep_verdict(path, verdict)
    return verdict


def _check(model: PreTrainedModel) -> Verdict:
    try:
        ForwardArguments.of(type(model))
    except UnsupportedModelError as error:
        return Verdict(False, str(error), "signature")
    try:
        small = build_shrunk(type(model), model.config)
        reference = _reference(small)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), "shrunk")
    except Exception as error:
        log.info("%s cannot be shrunk (%s); checking the loaded model", type(model).__name__, _where(error))
    else:
        return _compare(small, reference, "shrunk")
    try:
        reference = _reference(model)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), "loaded")
    except Exception as error:
        return Verdict(False, f"the original cannot be run for comparison: {_where(error)}", "loaded")
    return _compare(model, reference, "loaded")


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENGTHS]


@dataclass(frozen=True, slots=True)
class _Reference:
    """A prompt, how the original continues it, and its logits [_NUM_NEW_TOKENS, V] for each new token."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


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
        log.debug("the ragged forward of %s fails: %s", type(model).__name__, _where(error))
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


def _compare(model: PreTrainedModel, reference: Sequence[_Reference], checked_on: str) -> Verdict:
    on = "a shrunk instance" if checked_on == "shrunk" else "the loaded model (its config cannot be shrunk)"
    try:
        worst = 0.0
        for scenario in _SCENARIOS:
            error = _error(ragged_logits(model, reference, scenario.max_num_seqs, scenario.token_budget), reference)
            if not error <= 1.0:
                return Verdict(False, f"logits of {on} differ when run {scenario.name}", checked_on)
            worst = max(worst, error)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), checked_on)
    except Exception as error:
        return Verdict(False, f"the ragged forward of {on} fails: {_where(error)}", checked_on)
    return Verdict(True, f"checked against the original on {on}: alone, packed and in chunks", checked_on)


def _error(found: Sequence[torch.Tensor], reference: Sequence[_Reference]) -> float:
    """The largest difference, as a share of what is tolerated; NaN where either side is not finite."""
    expected = torch.cat([r.logits for r in reference])
    difference = (torch.cat(list(found)).float() - expected).abs()
    scale = expected.std()
    if found[0].dtype == torch.float32:
        return float(difference.max() / (scale * _TOLERANCE))
    return float(difference.mean() / (scale * _TOLERANCE_LOW_PRECISION))


def ragged_logits(
    model: PreTrainedModel, reference: Sequence[_Reference], max_num_seqs: int, token_budget: int
) -> list[torch.Tensor]:
    """Logits [_NUM_NEW_TOKENS, V] of each prompt in ragged batches, fed the reference's tokens."""
    runner = PlainRunner(model)
    try:
        num_blocks = 1 + sum(-(-(len(r.prompt) + len(r.tokens)) // _BLOCK_SIZE) for r in reference) * len(runner.groups)
        runner.allocate(num_blocks, _BLOCK_SIZE)
        config = SchedulerConfig(
            max_model_len=max(_PROMPT_LENGTHS) + _NUM_NEW_TOKENS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            block_size=_BLOCK_SIZE,
        )
        scheduler = Scheduler(config, runner.groups, num_blocks)
        by_id = {str(index): r for index, r in enumerate(reference)}
        rows: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in by_id}
        for request_id, r in by_id.items():
            scheduler.add(_request(request_id, r))
        while scheduler.has_unfinished:
            batch = scheduler.schedule(token_budget)
            result = runner.run(batch)
            sampled = {}
            for request, logits in zip(result.sampling, result.logits, strict=True):
                rows[request.request_id].append(logits)
                sampled[request.request_id] = by_id[request.request_id].tokens[len(request.output_token_ids)]
            scheduler.update(batch, sampled)
    finally:
        runner.close()
    return [torch.stack(rows[request_id]) for request_id in by_id]


def _request(request_id: str, reference: _Reference) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=reference.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=len(reference.tokens), ignore_eos=True),
        max_tokens=len(reference.tokens),
        arrival_time=0.0,
    )


def _where(error: Exception) -> str:
    """Type, message and the last line of the model's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "transfuse" not in Path(f.filename).parts and "torch" not in Path(f.filename).parts]
    place = f" ({Path(outside[-1].filename).name}:{outside[-1].lineno})" if outside else ""
    message = str(error).strip().splitlines()[0][:200] if str(error).strip() else "no message"
    return f"{type(error).__name__}: {message}{place}"
