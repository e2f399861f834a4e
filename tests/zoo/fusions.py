"""What is fused in each model type, as a table: made by running, with the counters of executed ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.zoo import MODEL_TYPES, build, load_facts
from tests.zoo.paged import paged_logits
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.kinds import install, uninstall
from transfuse.fusion.plan import FusionPlan
from transfuse.kernels.torch_ops import executions

TOLERANCE = 1e-4
_IDS = torch.randint(5, 500, (1, 12), generator=torch.Generator().manual_seed(0))
_PATTERNS = (
    "norm",
    "gated_norm",
    "residual_norm",
    "rotary",
    "qkv",
    "packed_qkv",
    "mla",
    "glu",
    "mlp",
    "linear",
    "router",
    "experts",
)

HEAD = """\
# What is fused, by model type

Made by `python -m tests.zoo fusions > docs/fusion-zoo.md`: each type is built small with random weights in float32,
analysed, fused, and run beside the original. *Linears*: of the calls of linear layers, those that run in a fused op.
*Same*: whether logits agree to 1e-4 of their spread. *Counted*: whether each op ran as often as the plan says, by the
counters of the ops themselves. *Fused*: whether the model as a whole counts as fused (nine tenths of the linear layers
of its decoder layers, and each residual with its norm). A star marks the standard types, which need nothing but
attention replaced to be served from a paged cache.
"""


@dataclass(frozen=True)
class Row:
    """One type.

    Attributes:
        name: the type.
        is_standard: see `Facts.standard`.
        is_moe: whether it has a mixture of experts.
        plan: what was fused; None where the model does not run.
        difference: largest difference of logits, in standard deviations.
        miscounted: ops that ran more or less often than planned, with both numbers.
        error: why it does not run.
    """

    name: str
    is_standard: bool
    is_moe: bool
    plan: FusionPlan | None = None
    difference: float = 0.0
    miscounted: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str | None = None

    @property
    def patterns(self) -> Counter[str]:
        """How often each pattern was applied."""
        kinds = self.plan.kinds if self.plan else ()
        return Counter(fusion.fuser for kind in kinds for fusion in kind.fusions for _ in kind.paths)

    @property
    def is_whole(self) -> bool:
        """Whether all linear layers are fused, and nothing changed."""
        plan = self.plan
        return plan is not None and plan.num_fused_linears == plan.num_linears > 0 and self.difference < TOLERANCE


def row_of(name: str) -> Row:
    """Build a type, fuse it and run it."""
    facts = load_facts()[name]
    about = (name, facts.standard, "moe" in facts.traits)
    try:
        model = build(name)
        expected = _logits(model, _IDS)
    except Exception as error:
        # Whatever a model's own code raises; facts.jsonl says which types do not run.
        return Row(*about, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    analysis = analyse_model(model)
    before = install(model, analysis)
    executions.clear()
    # Latents are kept in the engine's own cache only.
    run = paged_logits if any(f.fuser == "mla" for kind in analysis.plan.kinds for f in kind.fusions) else _logits
    with _counting_calls(model) as calls:
        found = run(model, _IDS)
    # Ops that write to a cache are no part of a plan.
    counted = Counter({op: count for op, count in executions.items() if not op.endswith(".torch")})
    uninstall(before)
    difference = float((found - expected).abs().max() / expected.std())
    return Row(*about, analysis.plan, difference, _miscounted(analysis.plan, calls, counted))


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


def _miscounted(plan: FusionPlan, calls: Counter[str], counted: Counter[str]) -> dict[str, tuple[int, int]]:
    """Ops that ran another number of times than the plan has them, given how often each module was called."""
    planned: Counter[str] = Counter()
    for kind in plan.kinds:
        times = sum(calls[path] for path in kind.paths)
        for fusion in kind.fusions:
            planned.update({kernel: times for kernel in fusion.kernels})
    every = {*planned, *counted}
    return {op: (counted[op], planned[op]) for op in every if counted[op] != planned[op]}


@contextmanager
def _counting_calls(model: nn.Module) -> Iterator[Counter[str]]:
    """Within it, calls of each module are counted by its path."""
    calls: Counter[str] = Counter()

    def count(path: str) -> Callable[..., None]:
        return lambda *_: calls.update((path,))

    hooks = [module.register_forward_pre_hook(count(path)) for path, module in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def rows(names: Sequence[str] = MODEL_TYPES) -> Iterator[Row]:
    """One row for each type."""
    yield from map(row_of, names)


def line(row: Row) -> str:
    """A row of the table."""
    name = f"{row.name}{' *' if row.is_standard else ''}"
    plan = row.plan
    if plan is None:
        return f"| {name} | | | | | does not run by itself: {row.error} |"
    patterns = ", ".join(f"{pattern} {row.patterns[pattern]}" for pattern in _PATTERNS if row.patterns[pattern])
    same = "yes" if row.difference < TOLERANCE else f"no ({row.difference:.1e})"
    counted = "yes" if not row.miscounted else f"no ({row.miscounted})"
    fused = "yes" if plan.counts_as_fused else f"no: {plan.shortfall}"
    linears = f"{plan.num_fused_linears}/{plan.num_linears}"
    return f"| {name} | {linears} | {same} | {counted} | {patterns} | {_left(row, fused)} |"


def _left(row: Row, fused: str) -> str:
    """What was left alone and why."""
    assert row.plan is not None
    reasons = dict.fromkeys(
        f"{kept.fuser} of {kind.module_class}: {kept.reason}" for kind in row.plan.kinds for kept in kind.kept
    )
    return "; ".join([fused, *reasons]).replace("|", "\\|").replace("\n", " ")


def table(names: Sequence[str] = MODEL_TYPES) -> str:
    """The whole page."""
    found = list(rows(names))
    standard = [row for row in found if row.is_standard]
    moe = [row for row in found if row.is_moe]
    routed = [row for row in moe if row.patterns["router"] and row.patterns["experts"]]
    summary = (
        f"Of {len(found)} types {sum(row.is_whole for row in found)} have every linear layer fused with equal logits, "
        f"and of {len(standard)} standard ones {sum(row.is_whole for row in standard)}, of which "
        f"{sum(row.plan is not None and row.plan.counts_as_fused for row in standard)} count as fused. "
        f"Of {len(moe)} with mixtures of experts, router and experts are fused in {len(routed)}.\n"
    )
    head = (
        "| type | linears | same | counted | patterns | fused, and what was left alone |\n|---|---|---|---|---|---|\n"
    )
    return f"{HEAD}\n{summary}\n{head}" + "\n".join(map(line, found)) + "\n"
