"""Checks code that was not seen before: does a model give the same logits in a ragged batch as on its own?

A ragged row is right only if nothing but attention mixes its tokens, and nobody can read that off a class name. So a
small random instance of the model is run both ways, once per source, config and versions, and the verdict kept. Where
the model is to be fused, the instance is analysed and fused like the model, so that one comparison shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from transfuse.engine.comparison import (
    Reference,
    Scenario,
    allocate,
    batch_logits,
    generate_reference,
    share_of_tolerance,
)
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.verdicts import Verdict, kept_or_found, verdict_path, where
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.fingerprint import own_source
from transfuse.kernels.cpu.loading import kernels_key
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.own_cache import new_cache
from transfuse.layers.own_forward import OwnForward, is_close
from transfuse.models.shrink import build_shrunk

log = logging.getLogger(__name__)

# Raise when the check itself changes, so that old verdicts are not trusted.
CHECK_VERSION = 7

# Longer than the windows of a shrunk config, of unlike lengths, one of a single token.
_PROMPT_LENGTHS = (23, 5, 1, 14, 19)
# The last is made of so few tokens: what a model makes of equal ones may be equal, and then has to be ordered.
_NUM_REPEATED = 5
# Tokens of a piece, where the original is given a prompt in several: small, and unlike each other.
_PIECES = (4, 5, 7)
# Texts are cut last: what fails then only may be served whole.
_SCENARIOS = (
    Scenario("alone", 1, 64),
    Scenario("packed between others", 5, 64),
    Scenario("in chunks", 5, 6, cuts_texts=True),
)
_PASSED = "checked against the original on"
_Compare = Callable[[PreTrainedModel, Sequence[Reference], str], Verdict]


def check_model(model: PreTrainedModel, cache_dir: Path) -> Verdict:
    """Whether `plain` may serve `model`'s source, config and versions, from `cache_dir` or found now and kept there."""
    return kept_or_found(plain_verdict_path(model, cache_dir), lambda: _check(model))


def check_fused(model: PreTrainedModel, cache_dir: Path) -> Verdict:
    """Whether `fused` may serve it, and which of its modules have to stay as they are; see `check_model`."""
    return kept_or_found(fused_verdict_path(model, cache_dir), lambda: _check(model, _compare_fused))


def plain_verdict_path(model: PreTrainedModel, cache_dir: Path) -> Path:
    """Where the verdict of `check_model` is kept."""
    return verdict_path(model, cache_dir, CHECK_VERSION)


def fused_verdict_path(model: PreTrainedModel, cache_dir: Path) -> Path:
    """Where the verdict of `check_fused` is kept."""
    return verdict_path(model, cache_dir, CHECK_VERSION, "fused", own_source(), kernels_key(cache_dir))


def _compare_plain(model: PreTrainedModel, reference: Sequence[Reference], checked_on: str) -> Verdict:
    return _compare(lambda: PlainRunner(model), reference, checked_on)


def _compare_fused(model: PreTrainedModel, reference: Sequence[Reference], checked_on: str) -> Verdict:
    """Compare the model with all fused; where that is wrong, find the classes that may not be.

    They are fused one by one, each on top of those that were right before.
    """
    whole = analyse_model(model)

    def compare(refused: dict[str, str]) -> Verdict:
        return _compare(lambda: FusedRunner(model, whole.without(refused)), reference, checked_on)

    verdict = compare({})
    if verdict.passed and not verdict.whole_texts:
        return verdict
    plain = _compare_plain(model, reference, checked_on)
    if not plain.passed:
        return plain
    if verdict.passed and plain.whole_texts:
        return verdict
    names = list(dict.fromkeys(kind.plan.module_class for kind in whole.kinds if kind.fused_class is not None))
    refused = dict.fromkeys(names, "not tried")
    for name in names:
        found = compare({other: reason for other, reason in refused.items() if other != name})
        if found.passed and found.whole_texts <= plain.whole_texts:
            del refused[name]
        else:
            refused[name] = found.reason
    if len(refused) == len(names):
        which = f" with any of {', '.join(names)} fused" if names else ""
        return Verdict(False, f"{verdict.reason}{which}", checked_on, refused)
    return replace(compare(refused), refused=refused)


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
    prompts = [torch.randint(vocab_size, (n,), generator=generator) for n in _PROMPT_LENGTHS]
    prompts[-1] = prompts[-1][torch.randint(_NUM_REPEATED, (len(prompts[-1]),), generator=generator)]
    return [prompt.tolist() for prompt in prompts]


def _reference(model: PreTrainedModel) -> list[Reference]:
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
    return [generate_reference(model, prompt) for prompt in _prompts(model)]


def _compare(make: Callable[[], PlainRunner], reference: Sequence[Reference], checked_on: str) -> Verdict:
    on = "a shrunk instance" if checked_on == "shrunk" else "the loaded model (its config cannot be shrunk)"
    try:
        with closing(make()) as runner:
            num_blocks = allocate(runner, reference)
            for scenario in _SCENARIOS:
                found = batch_logits(runner, reference, scenario, num_blocks)
                if not share_of_tolerance(found, reference, runner.model.dtype) <= 1.0:
                    wrong = f"logits of {on} differ when run {scenario.name}"
                    break
            else:
                return Verdict(True, f"{_PASSED} {on}: alone, packed and in chunks", checked_on)
        if scenario.cuts_texts and _reads_otherwise_in_pieces(runner.model, reference):
            remedy = "as its own forward's do, so that prompts are computed whole and prefixes are not shared"
            return Verdict(True, f"{_PASSED} {on}: alone and packed; {wrong}, {remedy}", checked_on, whole_texts=True)
        return Verdict(False, _after(runner.row_refusal, wrong), checked_on)
    except UnsupportedModelError as error:
        return Verdict(False, str(error), checked_on)
    except Exception as error:
        return Verdict(False, f"the ragged forward of {on} fails: {where(error)}", checked_on)


@torch.inference_mode()
def _reads_otherwise_in_pieces(model: PreTrainedModel, reference: Sequence[Reference]) -> bool:
    """Whether the original gives a text in pieces other logits than in one, over the cache that Transformers makes.

    So it is where a choice between equal scores depends on how many there are, for example.
    """
    forward = OwnForward(model)

    def logits(token_ids: torch.Tensor, size: int) -> torch.Tensor:
        cache, past, found = new_cache(model), 0, []
        for piece in torch.split(token_ids, size):
            found.append(forward(cache, piece, past, list(range(len(piece))))[0])
            past += len(piece)
        return torch.cat(found)

    prompts = [torch.tensor(r.prompt) for r in reference]
    return any(not is_close(logits(p, size), logits(p, len(p))) for p in prompts for size in _PIECES)


def _after(row_refusal: str, reason: str) -> str:
    """What is wrong where requests run by themselves comes after why they do."""
    return f"{row_refusal}; and request by request {reason}" if row_refusal else reason
