"""Verifies a model: runs it served, then the original, and compares."""

from __future__ import annotations

import gc
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from transfuse import __version__
from transfuse.errors import ConfigError
from transfuse.verify.checks import Bounds, Check, is_routed, skipped
from transfuse.verify.corpus import corpus
from transfuse.verify.modules import LayerError, PlaceError, References, compare_layers, compare_modules, references
from transfuse.verify.original import Original
from transfuse.verify.recording import Recording
from transfuse.verify.report import Report
from transfuse.verify.served import ALONE, WAYS, Generated, Served, Tokens
from transfuse.verify.texts import Disagreement, Spoken, TextErrors, compare_texts, speak, with_exact_gaps
from transfuse.verify.ways import WayDifference, compare_ways

if TYPE_CHECKING:
    from transfuse.config import EngineConfig
    from transfuse.engine.build import Summary
    from transfuse.models.resolve import ModelSource

# Lengths of the prompts whose modules are recorded: unlike each other, so that a mixed-up row shows.
_RECORDED_LENGTHS = (23, 17, 21)
_RECORDED_TOKENS = 6
_NUM_WAY_PROMPTS = 4
_LONGEST_PROMPT = 512


@dataclass(frozen=True)
class Extent:
    """How much is run.

    Attributes:
        prompts: file with prompts; None for the built-in texts.
        quick: a few prompts and tokens.
        max_tokens: tokens of the long generation; None for 512, or none where it has to be quick.
    """

    prompts: Path | None = None
    quick: bool = False
    max_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Greedy tokens of every prompt."""
        return 32 if self.quick else 256

    @property
    def num_long_tokens(self) -> int:
        """Greedy tokens of the first prompt."""
        return self.max_tokens or (0 if self.quick else 512)

    @property
    def num_way_tokens(self) -> int:
        """Tokens of each request that is run in several ways."""
        return 16 if self.quick else 64


@dataclass
class _Served:
    """What is left of the served model once it is closed."""

    summary: Summary
    fusions: dict[str, tuple[str, ...]]
    texts: list[Generated]
    recording: Recording
    recorded: list[Generated]
    ways: dict[str, WayDifference | str]


@dataclass
class _Compared:
    """What the oracle says to it."""

    places: list[PlaceError]
    layers: list[LayerError]
    texts: TextErrors
    references: list[TextErrors]
    tokens: list[Disagreement]


def verify(
    config: EngineConfig, source: ModelSource, extent: Extent, *, command: str, note: Callable[[str], None]
) -> Report:
    """Compare a served model with its original.

    One model is in memory at a time: first the served one, then, where it is not in float32, the original in its
    dtype, then the original in float32. What is carried from one to the next are tokens, log-probabilities, and what
    passed the modules on three short prompts.

    Args:
        config: how to serve it.
        source: the model.
        extent: how much to run.
        command: for the report.
        note: told of each phase.

    Raises:
        ConfigError: the prompts cannot be read.
        TransfuseError: the model cannot be loaded or run.
    """
    start = time.perf_counter()
    texts = corpus(extent.prompts, quick=extent.quick)
    served = _run_served(config, source, texts, extent, note)
    dtype: torch.dtype = getattr(torch, served.summary.dtype)
    memory = {"served model": served.summary.weight_bytes, "recorded tensors": served.recording.num_bytes}
    trust = config.model.trust_remote_code

    tensors: References | None = None
    said: list[list[Spoken]] = []
    if dtype != torch.float32:
        note(f"original in {served.summary.dtype}: what the dtype itself costs")
        original = Original(source, dtype, exact=False, trust_remote_code=trust)
        tensors = references(original, served.recording, served.recorded)
        said.append(speak(original, served.texts))
        memory |= {f"original in {served.summary.dtype}": original.num_bytes, "its tensors": tensors.num_bytes}
        if original.take_other_attention():
            note(f"original in {served.summary.dtype}, with other attention: what is chance")
            said.append(speak(original, served.texts))
        del original
        gc.collect()

    note("original in float32: the oracle")
    oracle = Original(source, torch.float32, exact=True, trust_remote_code=trust)
    memory["oracle"] = oracle.num_bytes
    model_class = type(oracle.module).__name__
    compared = _compare(oracle, served, tensors, said)
    checks, first = _judge(Bounds(dtype), served, compared, extent)
    memory["peak of the process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Report(
        model=served.summary.model,
        model_class=model_class,
        implementation=served.summary.implementation,
        reason=served.summary.reason,
        dtype=served.summary.dtype,
        versions=_versions(),
        command=command,
        checks=tuple(checks),
        first_divergence=first,
        num_places=len(compared.places),
        memory=memory,
        seconds=time.perf_counter() - start,
    )


def _versions() -> dict[str, str]:
    return {
        "transfuse": __version__,
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _run_served(
    config: EngineConfig, source: ModelSource, texts: list[str], extent: Extent, note: Callable[[str], None]
) -> _Served:
    note("served model: loading")
    served = Served(config, source, show_progress=False)
    try:
        prompts, counts = _sized(served, texts, extent)
        note(f"served model: {len(prompts)} prompts, {sum(counts):,} greedy tokens")
        answers = served.generate(prompts, counts)
        note("served model: recording its modules")
        recorded = _short_prompts(prompts)
        num_recorded = min(_RECORDED_TOKENS, served.limits.max_model_len - max(map(len, recorded)))
        recording, recorded_answers = served.record(recorded, num_recorded)
        ways = _run_ways(served, prompts, extent, note)
        return _Served(
            summary=served.summary,
            fusions=served.fusions,
            texts=answers,
            recording=recording,
            recorded=recorded_answers,
            ways=ways,
        )
    finally:
        served.close()
        del served
        gc.collect()


def _sized(served: Served, texts: list[str], extent: Extent) -> tuple[list[Tokens], list[int]]:
    """Tokens of the prompts, none longer than half of what the model takes, and how many tokens follow each."""
    longest = served.limits.max_model_len
    prompts = [served.tokenizer.encode(text)[: min(_LONGEST_PROMPT, max(longest // 2, 1))] for text in texts]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts or longest < 2:
        raise ConfigError(
            f"Nothing can be compared: {len(prompts)} prompts have tokens, of {longest} that may be used."
        )
    wanted = [max(extent.num_tokens, extent.num_long_tokens), *[extent.num_tokens] * (len(prompts) - 1)]
    return prompts, [min(count, longest - len(prompt)) for prompt, count in zip(prompts, wanted, strict=True)]


def _short_prompts(prompts: list[Tokens]) -> list[Tokens]:
    """Three prompts of unlike lengths, from the beginnings of those that there are."""
    return [prompts[i % len(prompts)][:length] for i, length in enumerate(_RECORDED_LENGTHS)]


def _run_ways(
    served: Served, prompts: list[Tokens], extent: Extent, note: Callable[[str], None]
) -> dict[str, WayDifference | str]:
    if not served.runs_several:
        return {way.name: f"`{served.summary.implementation}` runs one whole request at a time" for way in WAYS}
    chosen = prompts[:_NUM_WAY_PROMPTS]
    # Shares a beginning with the first prompt, and then goes on otherwise.
    chosen = [*chosen, chosen[0][: len(chosen[0]) * 3 // 4] + chosen[-1][: max(len(chosen[0]) // 4, 1)]]
    num_tokens = min(extent.num_way_tokens, served.limits.max_model_len - max(map(len, chosen)))
    # So short that several are admitted before the cache runs out.
    short = [prompt[: max(num_tokens // 2, 1)] for prompt in chosen]
    note(f"served model: {len(chosen)} requests alone")
    alone = {scarce: served.generate_in(ALONE, short if scarce else chosen, num_tokens)[0] for scarce in (False, True)}
    found: dict[str, WayDifference | str] = {}
    for way in WAYS:
        note(f"served model: {way.name}")
        if reason := served.rules_out(way):
            found[way.name] = reason
            continue
        repeats = served.generate_in(way, short if way.scarce else chosen, num_tokens)
        found[way.name] = compare_ways(alone[way.scarce], repeats)
    return found


def _compare(
    oracle: Original, served: _Served, tensors: References | None, said: Sequence[Sequence[Spoken]]
) -> _Compared:
    places = compare_modules(oracle, served.recording, served.recorded, tensors, served.fusions)
    layers = compare_layers(oracle, served.recording, served.recorded, tensors)
    texts, others = compare_texts(oracle, served.texts, said)
    # Last, since it may turn the oracle into another dtype.
    tokens = texts.disagreements if others else with_exact_gaps(oracle, served.texts, texts.disagreements)
    return _Compared(places, layers, texts, others, tokens)


def _judge(
    bounds: Bounds, served: _Served, compared: _Compared, extent: Extent
) -> tuple[list[Check], PlaceError | None]:
    modules = bounds.modules(compared.places)
    routed = is_routed(compared.places)
    tie = bounds.tie(compared.texts, compared.references, routed=routed)
    checks = [*modules, bounds.layers(compared.layers, routed=routed)]
    checks += bounds.texts(compared.texts, compared.references, routed=routed)
    checks.append(bounds.tokens("greedy", compared.tokens, compared.texts.num_tokens, tie))
    if extent.num_long_tokens > extent.num_tokens:
        checks.append(_long(bounds, served, compared, extent, tie))
    for way in WAYS:
        found = served.ways[way.name]
        if isinstance(found, str):
            checks.append(skipped("ways", way.name, found))
        else:
            caches = way.prefix_caching and not way.scarce
            checks += bounds.way(way.name, found, tie, preempts=way.scarce, caches=caches)
    failed = any(check.status == "fail" for check in modules)
    return checks, bounds.first_divergence(compared.places, failed)


def _long(bounds: Bounds, served: _Served, compared: _Compared, extent: Extent, tie: float) -> Check:
    """Of the long generation, which is the first prompt's."""
    count = len(served.texts[0].tokens)
    note = "; limited by the model's length" if count < extent.num_long_tokens else ""
    found = [d for d in compared.tokens if d.text == 0]
    return bounds.tokens(f"long generation of {count}", found, count, tie, note)
