"""Runs a model's fused forward on ragged batches: the plain runner, over modules with rewritten classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.verdicts import where
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.apply import Analysis, install, uninstall
from transfuse.fusion.plan import KindPlan
from transfuse.kernels.torch_ops import executions
from transfuse.layers.experts import fused_experts_of
from transfuse.layers.forward_arguments import ForwardArguments


class FusedRunner(PlainRunner):
    """See `ModelRunner` and `PlainRunner`.

    Args:
        model: in eval mode. Until `close`, its modules have their fused classes, and attention and experts go to the
            seams of this package.
        analysis: of this model.

    Raises:
        UnsupportedModelError: nothing can be fused, other ops ran than the plan says, or the model's code does
            something that a ragged batch cannot answer; the message names it.
    """

    implementation = "fused"

    def __init__(self, model: PreTrainedModel, analysis: Analysis) -> None:
        # A fused class has another name.
        ForwardArguments.of(type(model))
        if not analysis.plan.num_fusions:
            raise UnsupportedModelError(f"nothing of it can be fused{_why_nothing(analysis)}")
        with ExitStack() as restore:
            restore.callback(uninstall, install(model, analysis))
            restore.enter_context(fused_experts_of(model))
            with _counting_calls(model, analysis) as calls:
                before = executions.copy()
                self._init_plain(model)
                executed = executions - before
            # The plain runner's own is undone first.
            restore.push(self._restore)
            _check_claims(model, analysis, calls, executed)
            self._restore = restore.pop_all()

    def _init_plain(self, model: PreTrainedModel) -> None:
        try:
            super().__init__(model)
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
