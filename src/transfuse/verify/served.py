"""The model as it is served, and the ways in which its engine may run a request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transfuse.config import EngineConfig, SchedulerConfig
from transfuse.engine.batch import Batch
from transfuse.engine.build import Summary, build_engine
from transfuse.engine.core import EngineCore
from transfuse.engine.engine import Engine
from transfuse.engine.sampler import Sampler
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import CapacityError, EngineError
from transfuse.messages import NewRequest, RequestUpdate
from transfuse.outputs import LogprobsAtPosition
from transfuse.sampling_params import SamplingParams
from transfuse.verify.recording import Recorder, Recording

if TYPE_CHECKING:
    from transfuse.models.resolve import ModelSource

Tokens = list[int]

# Of each place, the most likely tokens whose log-probabilities are compared.
NUM_LOGPROBS = 20


@dataclass
class Generated:
    """One request's answer.

    Attributes:
        prompt: its tokens.
        tokens: the continuation, greedy.
        logprobs: at each token of it, the most likely ones.
        prompt_logprobs: the same at each token of the prompt after the first, if asked for.
        num_cached: prompt tokens that came from the prefix cache.
        num_preemptions: how often it lost its blocks.
    """

    prompt: Tokens
    tokens: Tokens = field(default_factory=list)
    logprobs: list[LogprobsAtPosition] = field(default_factory=list)
    prompt_logprobs: list[LogprobsAtPosition] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0

    def take(self, update: RequestUpdate) -> None:
        """Add what a step brought.

        Raises:
            TransfuseError: the request failed.
        """
        if update.error is not None:
            raise update.error
        self.tokens += update.token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs += update.prompt_logprobs
        self.num_cached = max(self.num_cached, update.num_cached_tokens)
        self.num_preemptions = max(self.num_preemptions, update.num_preemptions)


@dataclass(frozen=True)
class Way:
    """How an engine runs requests.

    Attributes:
        name: what reports call it.
        max_num_seqs: most requests in a step.
        budget: tokens in a step; None for as many as the served engine may have.
        prefix_caching: whether equal prefixes share blocks.
        scarce: whether the cache is just large enough for the longest request, so that others lose their blocks.
        repeats: how often the same requests run, one time after the other.
    """

    name: str
    max_num_seqs: int = 1
    budget: int | None = None
    prefix_caching: bool = False
    scarce: bool = False
    repeats: int = 1


ALONE = Way("alone")
WAYS = (
    Way("packed between others", max_num_seqs=8),
    Way("in chunks of 16", max_num_seqs=8, budget=16),
    Way("prefix-cached", prefix_caching=True, repeats=2),
    Way("preempted", max_num_seqs=8, budget=16, prefix_caching=True, scarce=True, repeats=2),
)
_RECORDED = Way("recorded", max_num_seqs=4, budget=24)


class _NotingScheduler(Scheduler):
    """A scheduler that tells a recorder what the next forward computes."""

    recorder: Recorder | None = None

    def schedule(self, token_budget: int) -> Batch:
        batch = super().schedule(token_budget)
        if self.recorder is not None and batch.entries:
            self.recorder.begin(batch)
        return batch


class Served:
    """A model in an engine, as a server would run it.

    Args:
        config: of the engine.
        source: of the model.
        show_progress: whether loading shows a progress bar.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, *, show_progress: bool) -> None:
        self._config = config
        # Its modules are looked at.
        config = replace(config, model=replace(config.model, use_stored_program=False))
        self._built = build_engine(config, source, show_progress=show_progress)
        self.tokenizer = self._built.tokenizer
        self.limits = self._built.limits

    @property
    def summary(self) -> Summary:
        """What a start-up table shows."""
        return self._built.summary

    @property
    def fusions(self) -> dict[str, tuple[str, ...]]:
        """By path of a module, the patterns that were fused in it."""
        plan = self._built.plan
        if plan is None:
            return {}
        return {path: tuple(f.fuser for f in kind.fusions) for kind in plan.kinds for path in kind.paths}

    def rules_out(self, way: Way) -> str | None:
        """Why requests cannot be run in a certain way; None if they can."""
        runner = self._built.core.engine.runner
        if way.scarce and not runner.groups:
            return "a request of this model takes no blocks, so that none has to give way"
        if way.budget is not None and not way.scarce and not runner.supports_chunks:
            return "this model's prompts are computed whole"
        if way.prefix_caching and not way.scarce and not runner.shares_prefixes:
            if not runner.supports_chunks:
                return "this model's prompts are computed whole, and none begins with another's"
            return "this model keeps a state of each request, so that prefixes are not shared"
        return None

    @property
    def runs_several(self) -> bool:
        """Whether requests may share steps."""
        return self._built.core.engine.runner.max_num_seqs != 1

    def generate(self, prompts: Sequence[Tokens], num_tokens: Sequence[int]) -> list[Generated]:
        """Continue prompts on the engine as it was configured, with log-probabilities of the prompts too."""
        return _run(self._built.core, prompts, num_tokens, prompt_logprobs=NUM_LOGPROBS)

    def generate_in(self, way: Way, prompts: Sequence[Tokens], num_tokens: int) -> list[list[Generated]]:
        """Continue prompts in a certain way; the answers of each repeat."""
        counts = [num_tokens] * len(prompts)
        core = self._core(way, max(map(len, prompts)) + num_tokens)[0]
        return [_run(core, prompts, counts) for _ in range(way.repeats)]

    def record(self, prompts: Sequence[Tokens], num_tokens: int) -> tuple[Recording, list[Generated]]:
        """Continue prompts, packed and in chunks where that can be, and write down what all modules did.

        Where requests run side by side nothing is written down: a module is called for some of them, and then others.
        """
        can_share = self._built.core.engine.runner.supports_chunks
        core, scheduler = self._core(_RECORDED if can_share else ALONE, 0)
        runner = core.engine.runner
        recorder = scheduler.recorder = Recorder(runner.model)
        listening = recorder.listening() if runner.runs_on_rows else nullcontext(recorder.recording)
        with runner.by_modules(), listening as recording:
            generated = _run(core, prompts, [num_tokens] * len(prompts))
        return recording, generated

    def _core(self, way: Way, longest: int) -> tuple[EngineCore, _NotingScheduler]:
        """Another engine over the same model and cache, of which it takes over all blocks or some."""
        engine = self._built.core.engine
        ceiling = self._config.max_num_batched_tokens
        if not engine.runner.supports_chunks:
            ceiling = max(self.limits.max_model_len, self._built.summary.max_num_seqs)
        budget = ceiling if way.budget is None or not engine.runner.supports_chunks else way.budget
        config = SchedulerConfig(
            max_model_len=self.limits.max_model_len,
            max_num_seqs=min(way.max_num_seqs, self._built.summary.max_num_seqs),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=self._config.enable_chunked_prefill and engine.runner.supports_chunks,
            enable_prefix_caching=way.prefix_caching and engine.runner.shares_prefixes,
            block_size=self._config.cache.block_size,
            keeps_states=engine.runner.bytes_per_state > 0,
            replays_outputs=not engine.runner.supports_chunks,
        )
        total = engine.scheduler.pool.num_total
        num_blocks = self._least_blocks(config, longest, total) if way.scarce else total
        scheduler = _NotingScheduler(config, engine.runner.groups, num_blocks)
        new = Engine(engine.runner, scheduler, Sampler(), StepBudget(budget, budget))
        return EngineCore(new, self.limits, frozenset()), scheduler

    def _least_blocks(self, config: SchedulerConfig, longest: int, total: int) -> int:
        """Blocks in which a request of this length just fits."""
        request = _request("probe", [0], longest - 1, None)
        runner = self._built.core.engine.runner
        for num_blocks in range(2, total):
            engine = Engine(runner, Scheduler(config, runner.groups, num_blocks), Sampler(), StepBudget(1, 1))
            try:
                EngineCore(engine, self.limits, frozenset()).add(request)
            except CapacityError:
                continue
            return num_blocks
        return total

    def close(self) -> None:
        """Give the model and its cache back."""
        self._built.core.close()


def _request(name: str, prompt: Tokens, num_tokens: int, prompt_logprobs: int | None) -> NewRequest:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=NUM_LOGPROBS,
        prompt_logprobs=prompt_logprobs,
    )
    return NewRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        max_tokens=num_tokens,
        arrival_time=time.monotonic(),
    )


def _run(
    core: EngineCore, prompts: Sequence[Tokens], num_tokens: Sequence[int], prompt_logprobs: int | None = None
) -> list[Generated]:
    answers = {str(index): Generated(prompt) for index, prompt in enumerate(prompts)}
    for (name, answer), count in zip(answers.items(), num_tokens, strict=True):
        core.add(_request(name, answer.prompt, count, prompt_logprobs))
    while core.has_unfinished:
        for update in core.step().updates:
            answers[update.request_id].take(update)
    for answer, count in zip(answers.values(), num_tokens, strict=True):
        if len(answer.tokens) != count:
            raise EngineError(f"The engine gave {len(answer.tokens)} tokens where {count} were asked for.")
    return list(answers.values())
