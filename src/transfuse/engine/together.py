"""Finds out which requests a model's own `generate` answers as one batch as it answers each alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial
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
from transfuse.engine.original_runner import OriginalRunner, Together
from transfuse.engine.verdicts import Verdict, kept_or_found, verdict_path, where
from transfuse.models.shrink import build_shrunk

log = logging.getLogger(__name__)

# Raise when this check changes, so that old verdicts are not trusted.
_VERSION = 1

# Unlike each other, and equal, one of a single token.
_PROMPT_LENGTHS = (14, 5, 14, 1, 14, 5)
_SCENARIOS = (
    Scenario("all at once", len(_PROMPT_LENGTHS), 64),
    # So few tokens in a step that some join while others run.
    Scenario("one after the other", len(_PROMPT_LENGTHS), 20),
)


def find_together(model: PreTrainedModel, cache_dir: Path) -> Together:
    """The most that a shrunken instance of the model shows to be exact; verdicts are kept in `cache_dir`."""
    for together in (Together.PADDED, Together.EQUAL_LENGTHS):
        path = verdict_path(model, cache_dir, _VERSION, together.name)
        if kept_or_found(path, partial(_check, model, together)).passed:
            return together
    return Together.NONE


def _check(model: PreTrainedModel, together: Together) -> Verdict:
    for keeps_depth in (False, True):
        try:
            small = build_shrunk(type(model), model.config, keeps_depth=keeps_depth)
            reference = [generate_reference(small, prompt) for prompt in _prompts(small)]
        except Exception as error:
            log.info("%s cannot be shrunk: %s", type(model).__name__, where(error))
        else:
            return _compare(small, together, reference)
    return Verdict(False, "its config cannot be shrunk", "shrunk")


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENGTHS]


def _compare(small: PreTrainedModel, together: Together, reference: Sequence[Reference]) -> Verdict:
    try:
        with closing(OriginalRunner(small, together)) as runner:
            num_blocks = allocate(runner, reference)
            for scenario in _SCENARIOS:
                found = batch_logits(runner, reference, scenario, num_blocks)
                if not share_of_tolerance(found, reference, small.dtype) <= 1.0:
                    return Verdict(False, f"logits of a batch differ, {scenario.name}", "shrunk")
    except Exception as error:
        # Whatever the model's own code raises for several requests.
        return Verdict(False, f"a batch fails: {where(error)}", "shrunk")
    return Verdict(True, "logits of a batch are those of each request alone", "shrunk")
