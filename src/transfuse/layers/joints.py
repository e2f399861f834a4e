"""Finds the modules that do to a token what they do whatever other tokens they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Cache

from transfuse.layers.lockstep import Joint, flat
from transfuse.layers.replaced_forwards import forwards_replaced
from transfuse.layers.token_dims import Shapes, shapes_of, token_dim

# Of the results' standard deviation, by which those of two parts of a row may differ from those of the whole row.
_TOLERANCE = 1e-3
_TOLERANCE_LOW_PRECISION = 0.05


def find_joints(model: nn.Module, forward: Callable[[int], object], short: int, long: int) -> dict[nn.Module, Joint]:
    """The outermost such modules, by running the model on one request.

    Which dimensions count tokens shows in rows of unlike lengths; that a module treats tokens alike, where it gives
    the same for a row and for two parts of it. Only modules with matrices are looked at: others cost less than to meet.

    Args:
        model: whose modules.
        forward: runs it on so many tokens.
        short: a number of tokens.
        long: another, larger; neither is 1.
    """
    modules = [
        module
        for module in model.modules()
        if module is not model and any(parameter.dim() > 1 for parameter in module.parameters())
    ]
    seen: list[dict[nn.Module, _Calls]] = []
    for count in (short, long):
        seen.append({module: _Calls(module.forward) for module in modules})
        with forwards_replaced(seen[-1]):
            forward(count)
    proofs: dict[nn.Module, _Proof] = {}
    progress = _Progress()
    for module in modules:
        dims = _dims(seen[0][module], seen[1][module], (short, long))
        if dims is not None:
            proofs[module] = _Proof(Joint(module.forward, *dims), progress)
    with forwards_replaced(proofs):
        forward(long)
    found = {module: proof.joint for module, proof in proofs.items() if proof.holds}
    inner = {part for module in found for part in module.modules() if part is not module}
    return {module: joint for module, joint in found.items() if module not in inner}


@dataclass
class _Calls:
    """Notes shapes of the leaves of each call of a forward, and of each result; None for what is no tensor."""

    forward: Callable[..., Any]
    given: list[Shapes] = field(default_factory=list)
    results: list[Shapes] = field(default_factory=list)
    holds_cache: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flat((args, kwargs))
        self.holds_cache |= any(isinstance(leaf, Cache) for leaf in leaves)
        self.given.append(shapes_of(leaves))
        result = self.forward(*args, **kwargs)
        self.results.append(shapes_of(flat(result)[0]))
        return result


_Dims = list[int | None]


def _dims(short: _Calls, long: _Calls, counts: tuple[int, int]) -> tuple[_Dims, _Dims] | None:
    """Which dimensions count tokens in what a module is given and gives back; None where it cannot be said."""
    if short.holds_cache or not short.given or len(short.given) != len(long.given):
        return None
    found: tuple[_Dims, _Dims] | None = None
    for given, other_given, result, other_result in zip(
        short.given, long.given, short.results, long.results, strict=True
    ):
        dims = _token_dims(given, other_given, counts), _token_dims(result, other_result, counts)
        if dims[0] is None or dims[1] is None or all(dim is None for dim in dims[0]):
            return None
        if any(dim is None and shape is not None for dim, shape in zip(dims[1], result, strict=True)):
            return None
        if found is not None and found != dims:
            return None
        found = (dims[0], dims[1])
    return found


def _token_dims(one: Shapes, other: Shapes, counts: tuple[int, int]) -> _Dims | None:
    try:
        return [token_dim(a, b, counts) for a, b in zip(one, other, strict=True)]
    except ValueError:
        return None


@dataclass
class _Progress:
    is_proving: bool = False


class _Proof:
    """Calls a module as it is and, to compare, on two parts of its row."""

    def __init__(self, joint: Joint, progress: _Progress) -> None:
        self.joint, self._progress = joint, progress
        self._compared: list[bool] = []

    @property
    def holds(self) -> bool:
        """Whether it ran, and no token's result depended on others."""
        return bool(self._compared) and all(self._compared)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.joint.forward(*args, **kwargs)
        if not self._progress.is_proving:
            self._progress.is_proving = True
            try:
                self._compared.append(self._is_same_in_parts(args, kwargs, result))
            finally:
                self._progress.is_proving = False
        return result

    def _is_same_in_parts(self, args: Any, kwargs: Any, result: Any) -> bool:
        dims = self.joint.given_dims
        leaves, spec = flat((args, kwargs))
        if len(leaves) != len(dims):
            return False
        pairs = list(zip(leaves, dims, strict=True))
        count = next(leaf.shape[dim] for leaf, dim in pairs if dim is not None)
        parts: list[list[Any]] = []
        for start, stop in ((0, count // 2), (count // 2, count)):
            given = [leaf if dim is None else leaf.narrow(dim, start, stop - start) for leaf, dim in pairs]
            part_args, part_kwargs = pytree.tree_unflatten(given, spec)
            try:
                parts.append(flat(self.joint.forward(*part_args, **part_kwargs))[0])
            except Exception:
                # Whatever a module's code may do with half a row: it is not joined then.
                return False
        return all(
            dim is None or _is_close(torch.cat((one, other), dim), whole)
            for one, other, dim, whole in zip(*parts, self.joint.result_dims, flat(result)[0], strict=True)
        )


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or not expected.dtype.is_floating_point:
        return torch.equal(found, expected)
    is_exact = expected.dtype in (torch.float32, torch.float64)
    found, expected = found.double(), expected.double()
    tolerance = expected.std() * (_TOLERANCE if is_exact else _TOLERANCE_LOW_PRECISION)
    return bool((found - expected).abs().max() <= tolerance)
