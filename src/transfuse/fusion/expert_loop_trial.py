"""Tries a part of a forward that runs experts: with small ones in their place, and tokens and choices of any kind."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from transfuse.fusion.expert_loop import Region
from transfuse.fusion.expert_stage import Stage
from transfuse.rewrite.source import MethodSource, RewriteRefused
from transfuse.trace.graph import Trace

_LEAST_TOKENS = 8
_MOST_NUMBERS = 2**24
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Loop:
    """What a region turned out to compute.

    Attributes:
        x: variable with the tokens, in a row or in rows.
        indices: variable with each token's experts [T, k].
        weights: variable with their weights [T, k].
        weigh_inputs: whether these are factors on what experts are given.
        is_detached: whether no gradient passes.
        view: what turns a result [T, H] into the region's, for source code; None where that is not known yet.
        num_dimensions: of `x`.
    """

    x: str
    indices: str
    weights: str
    weigh_inputs: bool = False
    is_detached: bool = False
    view: str | None = None
    num_dimensions: int = 2


@dataclass(frozen=True)
class _Case:
    """Tokens and which experts they go to.

    Attributes:
        lengths: of the rows of tokens.
        pattern: `spread` over all experts; all to the `same`; `twice` to each; some `beyond` the last.
    """

    lengths: tuple[int, ...]
    pattern: str = "spread"


class LoopTrial:
    """Finds out whether a region gives the weighted sums of what experts make of tokens.

    Args:
        trace: of the module that runs them.
        owner: the module.
        source: of its forward.
        experts: path of their list.
        size: of a token.

    Raises:
        RewriteRefused: the module is not given tokens.
    """

    def __init__(self, trace: Trace, owner: nn.Module, source: MethodSource, experts: str, size: int) -> None:
        self._stage = Stage(trace, owner, source, experts, size)
        self._owner, self._source, self._size = owner, source, size

    def looks_like(self, region: Region) -> Loop | None:
        """What a region seems to be, by one try; None where it is something else."""
        case = self._usual("spread")
        before = self._stage.variables(region, case.lengths)
        roles = () if before is None else _roles(region, before, self._size)
        for loop, weigh_inputs in itertools.product(roles, (False, True)):
            found = self._tried(region, replace(loop, weigh_inputs=weigh_inputs), case)
            if found is not None:
                return found
        return None

    def proved(self, region: Region, loop: Loop, numbers: Mapping[int, str], *, are_chosen: bool) -> Loop | None:
        """The same after more tries: few and many tokens, all with the same experts, numbers of the model's own type.

        Args:
            region: to try.
            loop: what `looks_like` found.
            numbers: that the code reads, with their places.
            are_chosen: whether a token's experts are known to be different ones of the list.

        Raises:
            RewriteRefused: the code reads numbers so large that nobody can try as many tokens.
        """
        usual = math.prod(self._usual("same").lengths)
        before = self._stage.variables(region, self._usual("spread").lengths) or {}
        where = self._source.where(region.statements[0])
        numbers = {v: where for name, v in before.items() if name in region.reads and type(v) is int} | dict(numbers)
        most = max((number for number in numbers if number != self._size), default=0) + 1
        if most * self._size > _MOST_NUMBERS:
            where = numbers[most - 1]
            raise RewriteRefused(f"{type(self._owner).__name__} may do otherwise for {most - 1} tokens ({where})")
        cases = [_Case(self._stage.lengths(1)), self._usual("same")]
        # What becomes of others does not matter where there are none; and what nothing becomes of is never there.
        cases += [] if are_chosen else [self._usual("twice"), self._usual("beyond")]
        if most > usual:
            cases.append(_Case(self._stage.lengths(most), "same"))
        for case in cases:
            found = self._tried(region, loop, case)
            is_needed = case.pattern not in ("twice", "beyond")
            reached = self._stage.variables(region, case.lengths) is not None
            if found is None and reached and (is_needed or self._runs(region, loop, case)):
                return None
            loop = loop if found is None else found
        return loop if self._keeps_type(region, loop) else None

    def _usual(self, pattern: str) -> _Case:
        return _Case(self._stage.lengths(max(_LEAST_TOKENS, self._stage.num_experts), 2), pattern)

    def _tried(self, region: Region, loop: Loop, case: _Case) -> Loop | None:
        """The loop, with what the case shows of it besides; None where the region gives something else."""
        variables = self._stage.variables(region, case.lengths)
        if variables is None:
            return None
        given = self._given(region, loop, case, variables)
        result = self._stage.run(region, given, grad=True)
        if result is None:
            return None
        tokens = given[loop.x], given[loop.indices], given[loop.weights]
        expected = self._stage.expected(*tokens, weigh_inputs=loop.weigh_inputs)
        is_alike = result.numel() == expected.numel() and result.shape[-1] == self._size
        flat = result.reshape(expected.shape) if is_alike else None
        if flat is None or not torch.allclose(flat, expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            return None
        leaves = [given[loop.x], given[loop.weights], *self._stage.parameters]
        is_telling = result.requires_grad and case.pattern == "spread"
        if is_telling and not _has_gradients(flat, expected, leaves):
            return None
        views = self._views(result, loop, given, variables)
        kept = next((view for view in views if loop.view in (None, view)), None)
        return None if kept is None else replace(loop, view=kept, is_detached=not result.requires_grad)

    def _views(
        self, result: torch.Tensor, loop: Loop, given: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Iterator[str]:
        """What may turn a result [T, H] into one of this shape."""
        if result.dim() == 2:
            yield ""
        if result.shape == given[loop.x].shape:
            yield f".view_as({loop.x})"
        for name, value in variables.items():
            if isinstance(value, torch.Tensor) and value.shape == result.shape:
                yield f".view_as({name})"
            if isinstance(value, tuple) and value == tuple(result.shape):
                yield f".view({name})"

    def _runs(self, region: Region, loop: Loop, case: _Case) -> bool:
        """Whether a region gives anything at all."""
        variables = self._stage.variables(region, case.lengths)
        return variables is not None and self._stage.run(region, self._given(region, loop, case, variables)) is not None

    def _keeps_type(self, region: Region, loop: Loop) -> bool:
        """Whether numbers of the model's own type stay of it."""
        case = self._usual("spread")
        variables = self._stage.variables(region, case.lengths, is_wide=False)
        if variables is None:
            return False
        given = {name: variables[name] for name in self._names(region, variables)}
        result = self._stage.run(region, given, is_wide=False)
        return result is not None and result.dtype == variables[loop.x].dtype

    def _names(self, region: Region, variables: Mapping[str, Any]) -> list[str]:
        return [name for name in variables if name in region.reads and name != "self"]

    def _given(self, region: Region, loop: Loop, case: _Case, variables: Mapping[str, Any]) -> dict[str, Any]:
        """What the region is to read: numbers for its tokens, choices and weights, and none for other tensors."""
        x, indices = variables[loop.x], variables[loop.indices]
        generator = torch.Generator().manual_seed(1)
        given: dict[str, Any] = {}
        for name in self._names(region, variables):
            value = variables[name]
            if name == loop.x:
                value = torch.randn(x.shape, generator=generator).requires_grad_()
            elif name == loop.weights:
                value = (torch.rand(indices.shape, generator=generator) + 0.5).requires_grad_()
            elif name == loop.indices:
                value = _choices(case.pattern, self._stage.num_experts, tuple(indices.shape), generator)
            elif isinstance(value, torch.Tensor):
                value = torch.full_like(value, float("nan"))
            given[name] = copy.copy(value) if isinstance(value, list | dict | set) else value
        return given


def _has_gradients(found: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether a result has the gradients of what is expected."""
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    own, others = (torch.autograd.grad((r * factors).sum(), leaves, allow_unused=True) for r in (found, expected))
    return all(
        one is not None and other is not None and torch.allclose(one, other, atol=_TOLERANCE, rtol=_TOLERANCE)
        for one, other in zip(own, others, strict=True)
    )


def _roles(region: Region, variables: Mapping[str, Any], size: int) -> Iterator[Loop]:
    """Which of the variables that a region reads may be tokens, choices and weights."""
    read = {name: value for name, value in variables.items() if name in region.reads and name != "self"}
    tensors = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in tensors.items() if value.is_floating_point()}
    choices = [name for name in tensors if tensors[name].dtype == torch.int64 and tensors[name].dim() == 2]
    held = [part for name, value in read.items() if name not in tensors for part in pytree.tree_leaves(value)]
    if len(tensors) != len(numbers) + 1 or not choices or any(isinstance(part, torch.Tensor) for part in held):
        return
    chosen = tensors[choices[0]]
    for weights, x in itertools.permutations(numbers, 2):
        tokens = numbers[x]
        is_row = tokens.dim() > 1 and tokens.shape[-1] == size and tokens.numel() == size * len(chosen)
        if is_row and numbers[weights].shape == chosen.shape:
            yield Loop(x, choices[0], weights, num_dimensions=tokens.dim())


def _choices(pattern: str, num_experts: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Experts [T, k]."""
    num_tokens, k = shape
    if pattern == "spread":
        order = torch.randperm(num_experts, generator=generator)
        rows = order[(torch.arange(num_tokens)[:, None] * k + torch.arange(k)) % num_experts]
        return rows[torch.randperm(num_tokens, generator=generator)]
    others = torch.randperm(num_experts - 1, generator=generator)[: k - 1]
    chosen = torch.cat((torch.tensor([num_experts - 1]), others))
    rows = torch.stack([chosen[torch.randperm(k, generator=generator)] for _ in range(num_tokens)])
    if pattern == "twice":
        return rows[:, :1].expand(-1, k).contiguous()
    return torch.where(rows == num_experts - 1, num_experts, rows) if pattern == "beyond" else rows
