"""Experts that declare Transformers' seam for them, as one op."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import nn

from transfuse.fusion.fused_class import fused_class
from transfuse.fusion.linears import caller
from transfuse.fusion.plan import Fusion
from transfuse.kernels.fused_ops import ACTIVATIONS, glu
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.source import MethodSource, RewriteRefused, method_source
from transfuse.trace.graph import ModelTrace, Trace

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "num_experts")
_Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """Experts whose forward is one op.

    Attributes:
        fused_class: what they become.
        fusion: for the plan.
        source: of the rewritten forward.
        original: of the one before.
    """

    fused_class: type[nn.Module]
    fusion: Fusion
    source: str
    original: str


def declares_experts(trace: Trace, model: ModelTrace) -> bool:
    """Whether a module is a collection of experts that Transformers lets others compute."""
    module = caller(trace, model)
    return all(hasattr(module, name) for name in _FLAGS) and hasattr(module, "config")


def fused_experts(trace: Trace, model: ModelTrace) -> FusedExperts:
    """The class with the op in the place of the forward.

    Raises:
        RewriteRefused: the experts compute something else.
    """
    module: Any = caller(trace, model)
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise RewriteRefused(f"{name} normalises what each expert gives")
    settings = _gated(module) if module.has_gate else _activated(module)
    if settings is None:
        raise RewriteRefused(f"{name} gates its experts in a way of its own")
    source = method_source(trace.module_class.forward)
    call = _call(module, source, settings)
    # Without the wrapper that asks which implementation is configured: this is one.
    bare = dataclasses.replace(source, method=source.function)
    method = compile_method(bare, with_body(source, call))
    details = {**settings, "num_experts": int(module.num_experts), "is_transposed": bool(module.is_transposed)}
    up = "gate_up_proj" if module.has_gate else "up_proj"
    fusion = Fusion("experts", (), ("experts",), sharding={up: "column", "down_proj": "row"}, details=details)
    return FusedExperts(fused_class(trace.module_class, method.function, {}), fusion, method.text, source.text)


def _gated(module: Any) -> _Settings | None:
    """How the experts are gated, found by comparing their gate with the op's on random numbers."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 8
    found = _try(module._apply_gate, x)
    limits = [
        None,
        *(v for v in vars(module).values() if isinstance(v, float | int) and not isinstance(v, bool) and v > 0),
    ]
    layouts = ("halves", "swapped", "interleaved")
    for activation, layout, limit, offset in itertools.product(ACTIVATIONS, layouts, limits, (0.0, 1.0)):
        if found is not None and torch.allclose(glu(x, activation, layout, limit, offset), found, atol=1e-5):
            return {"activation": activation, "layout": layout, "limit": limit, "offset": offset}
    return None


def _activated(module: Any) -> _Settings | None:
    """The activation of experts without a gate."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 4
    found = _try(module.act_fn, x)
    for name, activation in ACTIVATIONS.items():
        if found is not None and torch.allclose(activation(x), found, atol=1e-5):
            return {"activation": name, "layout": None, "limit": None, "offset": 0.0}
    return None


def _try(function: Any, x: torch.Tensor) -> torch.Tensor | None:
    """What a function of the model's gives, if it can be called on its own."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(x)
    except Exception:
        # Whatever it raises on numbers, such as for weights of its own: it is none of those that are known.
        return None
    return found if isinstance(found, torch.Tensor) and found.shape[0] == x.shape[0] else None


def _call(module: Any, source: MethodSource, settings: _Settings) -> str:
    given = [argument.arg for argument in source.tree.args.args[1:]]
    if len(given) != 3:
        raise RewriteRefused(f"{type(module).__name__} is given more than tokens, indices and weights")
    up = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [
        text
        for name in (up, "down_proj")
        for text in (f"self.{name}", f"self.{name}_bias" if module.has_bias else "None")
    ]
    options = [repr(settings["activation"]), *(f"{k}={settings[k]!r}" for k in ("layout", "limit", "offset"))]
    options.append(f"is_transposed={bool(module.is_transposed)}")
    plain = ("layout='halves'", "limit=None", "offset=0.0", "is_transposed=False")
    kept = [option for option in options if option not in plain]
    return f"torch.ops.transfuse.experts({', '.join([*given, *weights, *kept])})"


def with_body(source: MethodSource, call: str) -> ast.FunctionDef:
    """A method that returns an expression and does nothing else."""
    tree = copy.deepcopy(source.tree)
    tree.body = ast.parse(f"return {call}").body
    return tree
