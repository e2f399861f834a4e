"""Holds what was measured against its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from transfuse.verify.modules import LayerError, PlaceError
from transfuse.verify.texts import Disagreement, TextErrors
from transfuse.verify.ways import WayDifference

Status = Literal["pass", "fail", "skipped"]

# Of float32. A single module on equal inputs rounds a few times, those without long sums that may cancel least; what
# adds up over all layers may be larger.
MODULE_BOUND = 1e-5
POINTWISE_BOUND = 2e-6
POINTWISE = frozenset({"norm", "rotary", "embedding", "activation", "decoder layer"})
LAYER_BOUND = 1e-4
LOGPROB_BOUND = 1e-4
TIE = 1e-4
# A router on equal inputs may choose otherwise where two experts are as good as equal.
INTEGER_BOUND = 0.01
# In lower precision: how much larger than the original's own an error may be, taken over many modules or texts; and
# where chance has more of a say: at a single place, of a single number, or where some tokens went to other experts.
RATIO = 1.1
SINGLE_RATIO = 2.0
# Of all errors, the share that is held to the first of these: so many that chance moves its edge by some 5% only.
MOST = 0.99


@dataclass(frozen=True)
class Check:
    """One measured number and its bound.

    Attributes:
        group: `modules`, `layers`, `log-probabilities`, `tokens` or `ways`.
        name: what was measured.
        measured: the number; None where there is none.
        bound: the most that it may be.
        status: whether it is; `skipped` where it could not be measured.
        detail: the rest, in words.
    """

    group: str
    name: str
    measured: float | None
    bound: float | None
    status: Status
    detail: str = ""


def held(group: str, name: str, measured: float, bound: float, detail: str = "") -> Check:
    """A check of one number; one that is no number fails."""
    return Check(group, name, measured, bound, "pass" if measured <= bound else "fail", detail)


def skipped(group: str, name: str, why: str) -> Check:
    """A check that could not be done."""
    return Check(group, name, None, None, "skipped", why)


class Bounds:
    """What errors a dtype may have.

    Args:
        dtype: of the served model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.exact = dtype == torch.float32
        # Of one rounding to the dtype: an original that happens to round nowhere is no yardstick.
        self._rounding = torch.finfo(dtype).eps / 4

    def place(self, error: PlaceError) -> float:
        """The most that a place may be off."""
        if error.integral:
            return INTEGER_BOUND if self.exact else max(SINGLE_RATIO * (error.reference or 0.0), 0.05)
        if self.exact:
            return POINTWISE_BOUND if error.kind in POINTWISE else MODULE_BOUND
        return SINGLE_RATIO * max(error.reference or 0.0, self._rounding)

    def modules(self, errors: Sequence[PlaceError]) -> list[Check]:
        """A check for each kind of module, in order of appearance."""
        if not errors:
            return [skipped("modules", "all", "no module of the served model could be observed")]
        kinds = dict.fromkeys(error.kind for error in errors)
        return [self._kind(kind, [error for error in errors if error.kind == kind]) for kind in kinds]

    def _kind(self, kind: str, errors: Sequence[PlaceError]) -> Check:
        bad = [error for error in errors if not error.served <= self.place(error)]
        worst = max(errors, key=lambda error: (error.served / self.place(error), not error.integral))
        count = len({error.path for error in errors})
        detail = f"{count} module{'s' * (count > 1)}"
        numbers = [error for error in errors if not error.integral]
        if self.exact or worst in bad or not numbers:
            place = f", worst {worst.path}: {worst.place}" if worst.served > 0 else ""
            return held("modules", kind, worst.served, self.place(worst), detail + place)
        reference = _root_mean_square([error.reference or 0.0 for error in numbers])
        served = _root_mean_square([error.served for error in numbers])
        return held("modules", kind, served, RATIO * max(reference, self._rounding), detail + " together")

    def first_divergence(self, errors: Sequence[PlaceError], failed: bool) -> PlaceError | None:
        """The first place that is off by more than it may be; if only a kind as a whole is, its worst place."""
        beyond = next((error for error in errors if not error.served <= self.place(error)), None)
        if beyond is not None or not failed or not errors:
            return beyond
        return max(errors, key=lambda error: error.served / max(error.reference or 0.0, self._rounding))

    def layers(self, errors: Sequence[LayerError], *, routed: bool) -> Check:
        """Of what adds up over the layers.

        Args:
            errors: of each layer.
            routed: whether the model chooses experts. In lower precision a choice between two that are nearly equal
                may fall otherwise and changes that token by much: then the median token counts.
        """
        if not errors:
            return skipped("layers", "all", "no layer of the served model could be observed")
        worst = max(errors, key=lambda error: error.served)
        if self.exact:
            return held("layers", "after each layer", worst.served, LAYER_BOUND, f"worst {worst.path}")
        reference = _root_mean_square([error.reference or 0.0 for error in errors])
        served = _root_mean_square([error.served for error in errors])
        detail = f"over all, worst {worst.path}"
        if routed:
            detail = f"median token; over all {served:.2e}, the original {reference:.2e}"
            reference = _root_mean_square([error.reference_median for error in errors])
            served = _root_mean_square([error.served_median for error in errors])
        ratio = SINGLE_RATIO if routed else RATIO
        return held("layers", "after each layer", served, ratio * reference, detail)

    def texts(self, served: TextErrors, references: Sequence[TextErrors], *, routed: bool) -> list[Check]:
        """Of log-probabilities; see `layers`.

        Args:
            served: of the served model.
            references: of the original in the served dtype, run in one way or two; none where that is the oracle's.
            routed: see `layers`.
        """
        group, detail = "log-probabilities", f"{served.count:,} values"
        if not references:
            return [
                held(group, "mean error", served.mean, LOGPROB_BOUND, detail),
                held(group, "largest error", served.largest, LOGPROB_BOUND, detail),
            ]
        mean = max(reference.mean for reference in references)
        if routed:
            detail += f"; mean {served.mean:.3f}, the original {mean:.3f}"
            bound = SINGLE_RATIO * max(reference.median for reference in references)
            return [held(group, "error at the median place", served.median, bound, detail)]
        most = max(reference.quantile(MOST) for reference in references)
        return [
            held(group, "mean error", served.mean, RATIO * mean, detail),
            held(group, "error of all but 1%", served.quantile(MOST), RATIO * most, detail),
            _largest(group, served, references, most),
        ]

    def tie(self, served: TextErrors, references: Sequence[TextErrors], *, routed: bool) -> float:
        """Two tokens nearer than this are as likely as each other: each may be off by the largest error."""
        if not references:
            return TIE
        return 2 * SINGLE_RATIO * max(references[0].largest, served.largest if routed else 0.0)

    def tokens(self, name: str, found: Sequence[Disagreement], num_tokens: int, tie: float, note: str = "") -> Check:
        """Of greedy tokens: how far below the oracle's choice the worst one is."""
        worst = max(found, key=lambda d: d.gap, default=None)
        detail = f"{num_tokens - len(found):,} of {num_tokens:,} tokens equal"
        if worst is not None:
            detail += f"; furthest off: token {worst.index} of prompt {worst.text}"
        return held("tokens", name, 0.0 if worst is None else worst.gap, tie, detail + note)

    def way(self, name: str, found: WayDifference, tie: float, *, preempts: bool, caches: bool) -> list[Check]:
        """Of requests run in a certain way, against the same requests alone."""
        if preempts and not found.num_preemptions:
            return [skipped("ways", name, "the cache could not be made small enough to preempt a request")]
        if caches and not found.num_cached:
            return [skipped("ways", name, "no prompt is long enough to be found in the prefix cache")]
        detail = (
            f"{found.num_requests} requests; log-probabilities {'bit-equal' if found.same_bits else 'not bit-equal'}"
        )
        if found.num_preemptions:
            detail += f"; {found.num_preemptions} preemptions"
        if found.num_cached:
            detail += f"; {found.num_cached} tokens cached"
        if found.different:
            prompt, index, _ = found.different[0]
            detail += f"; {len(found.different)} differ, first at token {index} of prompt {prompt}"
        gap = max((gap for _, _, gap in found.different), default=0.0)
        return [
            held("ways", f"{name}: tokens", gap, tie, detail),
            held("ways", f"{name}: log-probabilities", found.largest, tie, f"{found.num_tokens:,} places"),
        ]


def is_routed(errors: Sequence[PlaceError]) -> bool:
    """Whether a model chooses among experts: its blocks hand on integers that are no positions."""
    return any(error.integral and error.kind in ("router", "experts", "moe", "mlp") for error in errors)


def _root_mean_square(values: Sequence[float]) -> float:
    return float((sum(value**2 for value in values) / max(len(values), 1)) ** 0.5)


def _largest(group: str, served: TextErrors, references: Sequence[TextErrors], most: float) -> Check:
    """Of the largest error, which is that of a single place.

    At some places all that is rounded is off by much, and by how much is chance: two runs of the original differ there
    too. So what counts is by how much a place is worse than in both, and the bound is how far those are apart.
    """
    largest = " and ".join(f"{reference.largest:.2f}" for reference in references)
    detail = f"largest error {served.largest:.2f}, the original's {largest}"
    if len(references) == 1:
        return held(group, "largest error", served.largest, SINGLE_RATIO * references[0].largest, detail)
    one, other = (reference.peaks for reference in references)
    excess = float((served.peaks - torch.maximum(one, other)).amax().clamp(min=0).nan_to_num(nan=float("inf")))
    apart = float((one - other).abs().amax())
    return held(group, "largest error beyond the original's", excess, SINGLE_RATIO * max(apart, most), detail)
