"""What a plan says of a kind of module, as lines of text; loads no torch, since the server tells it too."""

from __future__ import annotations

from collections.abc import Iterator

from transfuse.fusion.plan import Fusion, FusionPlan, KindPlan


def reasons(kind: KindPlan) -> Iterator[tuple[str, str]]:
    """Each pattern that was left alone in a kind of module, with why and where, each line once."""
    for kept in dict.fromkeys(kind.kept):
        reason = kept.reason
        # Most reasons name the place already.
        if ".py:" not in reason and kind.file:
            reason = f"{reason} ({kind.file.rsplit('/', 1)[-1]}:{kept.line or kind.line})"
        yield kept.fuser, reason


def consumed_by(plan: FusionPlan) -> dict[str, str]:
    """Paths of the modules that are no longer called, with the pattern that computes what they would."""
    return {
        f"{path}.{child}" if path else child: fusion.fuser
        for kind in plan.kinds
        for fusion in kind.fusions
        for path in kind.paths
        for child in fusion.children
    }


def fusion_line(fusion: Fusion) -> str:
    """`qkv: q_proj, k_proj, v_proj → linear`; of what goes through a seam, the name alone."""
    what = f": {', '.join(fusion.children)}" if fusion.children else ""
    ops = f" → {', '.join(fusion.kernels)}" if fusion.kernels else ""
    return f"{fusion.fuser}{what}{ops}"
