"""Runs a model's fused forward on ragged batches: the plain runner, over modules with rewritten classes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from transfuse.cache.kv_cache import KVCache
from transfuse.cache.state_cache import StateCache
from transfuse.engine.batch import Batch
from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.ragged_step import run_in_two
from transfuse.engine.runner import StepLogits
from transfuse.engine.sizing import available_memory
from transfuse.engine.step_program import StepProgram, capture_step
from transfuse.engine.verdicts import where
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.kinds import Analysis, install, uninstall
from transfuse.fusion.plan import KindPlan
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.kernels.torch_ops import executions
from transfuse.layers.experts import fused_experts_of
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.paged_cache import DecodeCache, PagedCache
from transfuse.layers.step_context import StepContext
from transfuse.program.errors import CaptureError
from transfuse.program.executable import Executable
from transfuse.program.graph import Graph, TorchOp
from transfuse.program.native import NativeOp
from transfuse.progress import ProgressCounter

log = logging.getLogger(__name__)


class FusedRunner(PlainRunner):
    """See `ModelRunner` and `PlainRunner`.

    Args:
        model: in eval mode. Until `close`, its modules have their fused classes, and attention and experts go to the
            seams of this package.
        analysis: of this model.
        owns_weights: whether nobody else uses the model, so that the memory of weights that are kept in another
            layout may be given back.
        whole_texts: see `PlainRunner`.

    Attributes:
        observe: is shown the cache and the program, while the weights are still as they were; to be set before
            `allocate`.

    Raises:
        UnsupportedModelError: nothing can be fused, other ops ran than the plan says, or the model's code does
            something that a ragged batch cannot answer; the message names it.
    """

    implementation = "fused"

    def __init__(
        self, model: PreTrainedModel, analysis: Analysis, *, owns_weights: bool = False, whole_texts: bool = False
    ) -> None:
        self._owns_weights = owns_weights
        self.observe: Callable[[KVCache, Graph, Sequence[NativeOp | TorchOp]], None] | None = None
        self._program: StepProgram | None = None
        self._is_by_modules = False
        # Why there is none.
        self._no_program = "no cache has been allocated"
        self._progress: ProgressCounter | None = None
        # A fused class has another name.
        ForwardArguments.of(type(model))
        if not analysis.plan.num_fusions:
            raise UnsupportedModelError(f"nothing of it can be fused{_why_nothing(analysis)}")
        with ExitStack() as restore:
            restore.callback(uninstall, install(model, analysis))
            restore.enter_context(fused_experts_of(model))
            with _counting_calls(model, analysis) as self._calls:
                self._init_plain(model, whole_texts)
                executed = executions - self._executed_before
            # The plain runner's own is undone first.
            restore.push(self._restore)
            _check_claims(model, analysis, self._calls, executed)
            self._restore = restore.pop_all()

    @property
    def executable(self) -> Executable | None:
        """See `ModelRunner.executable`."""
        return None if self._program is None else self._program.executable

    @property
    def kernels(self) -> str:
        """See `ModelRunner.kernels`."""
        if self._program is None:
            return f"torch ({self._no_program})"
        if not self._state_layers:
            return str(load_kernels())
        names = ", ".join(dict.fromkeys(layer.name for layer in self._state_layers))
        return f"{load_kernels()}; of prompts torch ({names} runs on each by itself)"

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """See `ModelRunner.allocate`; then the forward is made a program, where it can be one.

        Where states are kept, it is the forward of steps in which every request goes on by one token.
        """
        num_bytes = super().allocate(num_blocks, block_size)
        assert self._kv is not None
        if self.lockstep is not None:
            self._no_program = "each request has a forward of its own"
            return num_bytes
        if self.apart:
            # How often such layers run depends on the batch.
            names = ", ".join(layer.__name__ for layer in self.apart)
            self._no_program = f"{names} runs on a part of the requests at a time"
            return num_bytes
        loaded = load_kernels()
        if loaded.library is None:
            self._no_program = loaded.origin
            return num_bytes
        if self.state_specs and not self._fits_twice(num_bytes):
            self._no_program = "its weights do not fit into memory twice, for single tokens and for prompts"
            return num_bytes
        observe = self.observe
        try:
            self._program = capture_step(
                self._logits_of_modules,
                self._kv,
                self.groups,
                block_size,
                self._model.config.get_text_config(decoder=True).vocab_size,
                loaded.library,
                state_specs=self.state_specs,
                # Prompts run by the modules where a state is kept: its layers take each prompt by itself.
                frees_weights=self._owns_weights and not self.state_specs,
                observe=None if observe is None else partial(observe, self._kv),
            )
        except CaptureError as error:
            self._no_program = str(error)
            log.info("%s runs module by module: %s", type(self._model).__name__, error)
        return num_bytes

    def _fits_twice(self, cache_bytes: int) -> bool:
        """Whether there is memory for packed weights beside the modules' own, once the whole cache is in use."""
        assert self._states is not None
        weight_bytes = sum(int(weight.nbytes) for weight in self._model.parameters())
        return cache_bytes + self._states.num_bytes + weight_bytes <= available_memory()

    def show_progress(self, counter: ProgressCounter) -> None:
        """See `ModelRunner.show_progress`."""
        super().show_progress(counter)
        self._progress = counter

    @contextmanager
    def by_modules(self) -> Iterator[None]:
        """See `ModelRunner.by_modules`."""
        if self._program is not None:
            self._program.executable.restore()
        self._is_by_modules = True
        try:
            yield
        finally:
            self._is_by_modules = False

    def _run(self, batch: Batch) -> StepLogits:
        # The compiled kernels give a row the same bits whatever the number of rows, so that none are padded.
        if self._program is None or self._is_by_modules:
            return super()._run(batch)
        if not self.state_specs:
            return self._run_by(batch, self._logits_of_program, 1)
        return run_in_two(batch, lambda decodes: self._run_by(decodes, self._logits_of_program, 1), super()._run)

    @torch.inference_mode()
    def _logits_of_program(self, context: StepContext) -> torch.Tensor:
        assert self._program is not None
        if self._states is None:
            return self._program.run(context, progress=self._progress)
        with self._states.together(context.state_index) as states:
            return self._program.run(context, states, self._progress)

    def _logits_of_modules(self, context: StepContext, states: StateCache | None) -> torch.Tensor:
        """As a program is to compute them, outside of inference mode, which hides what an operation is made of."""
        assert self._kv is not None
        cache = (
            PagedCache(self._kv, context, self._layout)
            if states is None
            else DecodeCache(self._kv, context, self._layout, states)
        )
        return self._forward(cache, context)

    def _before_probe(self) -> None:
        # What a refused try did is not counted.
        self._calls.clear()
        self._executed_before = executions.copy()

    def _init_plain(self, model: PreTrainedModel, whole_texts: bool) -> None:
        try:
            super().__init__(model, whole_texts=whole_texts)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"its fused forward fails: {where(error)}") from error


def _why_nothing(analysis: Analysis) -> str:
    plan = analysis.plan
    if plan.error is not None:
        return f" ({plan.error})"
    reasons = [f"{kind.module_class}: {kept.reason}" for kind in plan.kinds for kept in kind.kept]
    return f" ({reasons[0]})" if reasons else ": no pattern was found in it"


@contextmanager
def _counting_calls(model: nn.Module, analysis: Analysis) -> Iterator[Counter[nn.Module]]:
    """Within it, calls of modules that have something fused are counted."""
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        calls[module] += 1

    with ExitStack() as hooks:
        for kind in _fused(analysis):
            for path in kind.paths:
                hooks.callback(model.get_submodule(path).register_forward_pre_hook(count).remove)
        yield calls


def _fused(analysis: Analysis) -> list[KindPlan]:
    return [kind.plan for kind in analysis.kinds if kind.fused_class is not None]


def _check_claims(model: nn.Module, analysis: Analysis, calls: Counter[nn.Module], executed: Counter[str]) -> None:
    """Compare what the plan says with what ran in one forward.

    Raises:
        UnsupportedModelError: they differ.
    """
    expected: Counter[str] = Counter()
    absorbed: set[nn.Module] = set()
    for kind in _fused(analysis):
        for module in map(model.get_submodule, kind.paths):
            for fusion in kind.fusions:
                children = [module.get_submodule(name) for name in fusion.children]
                # A linear layer may run the op in a fused class of its own, and is counted there.
                if not (fusion.fuser == "linear" and any(calls[child] for child in children)):
                    for kernel in fusion.kernels:
                        expected[kernel] += calls[module]
                    absorbed.update(children)
    for kind in _fused(analysis):
        modules = set(map(model.get_submodule, kind.paths))
        if not any(calls[module] for module in modules) and not modules <= absorbed:
            raise UnsupportedModelError(f"{kind.module_class} has a fused forward, and it did not run")
    for kernel, count in expected.items():
        if executed[kernel] != count:
            raise UnsupportedModelError(
                f"the fused forward should run {kernel} {count} times, and ran it {executed[kernel]} times"
            )
