"""Tries a part of a forward that runs experts: with small ones in their place, and tokens and choices of any kind."""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from transfuse.fusion.evaluate import overlapping_numbers
from transfuse.fusion.expert_loop import Region
from transfuse.rewrite.compiled import compile_part
from transfuse.rewrite.scope import bodies
from transfuse.rewrite.source import MethodSource, RewriteRefused
from transfuse.trace.graph import TensorFacts, Trace, value_of

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


class _Captured(Exception):
    """The variables of a forward where a region begins."""

    def __init__(self, variables: dict[str, Any]) -> None:
        super().__init__()
        self.variables = variables


class _Expert(nn.Module):
    """Stands for an expert: something that is not linear, and different for each."""

    def __init__(self, factor: torch.Tensor, offset: torch.Tensor) -> None:
        super().__init__()
        self.factor, self.offset = factor, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).tanh() + self.offset


class LoopTrial:
    """Finds out whether a region gives the weighted sums of what experts make of tokens.

    Args:
        trace: of the module that runs them.
        owner: the module.
        source: of its forward.
        experts: path of their list.
        size: of a token.
    """

    def __init__(self, trace: Trace, owner: nn.Module, source: MethodSource, experts: str, size: int) -> None:
        self._trace, self._owner, self._source = trace, owner, source
        self._list, self._size = experts, size
        self._num_experts = len(owner.get_submodule(experts)._modules)
        self._generator = torch.Generator().manual_seed(0)
        self._factors = torch.randn(self._num_experts, size, generator=self._generator)
        self._offsets = torch.randn(self._num_experts, size, generator=self._generator)
        self._before: dict[tuple[int, _Case, bool], dict[str, Any] | None] = {}
        self._standing = {is_wide: self._stand_in(is_wide) for is_wide in (True, False)}
        tokens = next((f for f in map(value_of, trace.arguments.values()) if self._holds_tokens(f)), None)
        if tokens is None:
            raise RewriteRefused(f"{type(owner).__name__} is not given tokens ({source.where()})")
        self._lead = tokens.shape[:-1]

    def _holds_tokens(self, facts: Any) -> bool:
        is_numbers = isinstance(facts, TensorFacts) and facts.dtype.is_floating_point
        return is_numbers and len(facts.shape) > 1 and facts.shape[-1] == self._size

    def _lengths(self, count: int, rows: int = 1) -> tuple[int, ...]:
        """So many tokens in as many dimensions as the module is given."""
        if len(self._lead) == 1:
            return (count,)
        return (*(1,) * (len(self._lead) - 2), rows, -(-count // rows))

    def looks_like(self, region: Region) -> Loop | None:
        """What a region seems to be, by one try; None where it is something else."""
        case = self._usual("spread")
        before = self._variables(region, case)
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
        before = self._variables(region, self._usual("spread")) or {}
        where = self._source.where(region.statements[0])
        numbers = {v: where for name, v in before.items() if name in region.reads and type(v) is int} | dict(numbers)
        most = max((number for number in numbers if number != self._size), default=0) + 1
        if most * self._size > _MOST_NUMBERS:
            where = numbers[most - 1]
            raise RewriteRefused(f"{type(self._owner).__name__} may do otherwise for {most - 1} tokens ({where})")
        cases = [_Case(self._lengths(1)), self._usual("same")]
        # What becomes of others does not matter where there are none; and what nothing becomes of is never there.
        cases += [] if are_chosen else [self._usual("twice"), self._usual("beyond")]
        if most > usual:
            cases.append(_Case(self._lengths(most), "same"))
        for case in cases:
            found = self._tried(region, loop, case)
            is_needed = case.pattern not in ("twice", "beyond")
            reached = self._variables(region, case) is not None
            if found is None and reached and (is_needed or self._runs(region, loop, case)):
                return None
            loop = loop if found is None else found
        return loop if self._keeps_type(region, loop) else None

    def _usual(self, pattern: str) -> _Case:
        return _Case(self._lengths(max(_LEAST_TOKENS, self._num_experts), 2), pattern)

    def _tried(self, region: Region, loop: Loop, case: _Case) -> Loop | None:
        """The loop, with what the case shows of it besides; None where the region gives something else."""
        variables = self._variables(region, case)
        if variables is None:
            return None
        given = self._given(region, loop, case, variables)
        result = self._result(region, given, grad=True)
        if result is None:
            return None
        leaves = [given[loop.x], given[loop.weights], self._factors, self._offsets]
        with torch.enable_grad():
            expected = self._expected(given[loop.x], given[loop.indices], given[loop.weights], loop.weigh_inputs)
        is_alike = result.numel() == expected.numel() and result.shape[-1] == self._size
        flat = result.reshape(expected.shape) if is_alike else None
        if flat is None or not torch.allclose(flat, expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            return None
        if result.requires_grad and not self._has_gradients(flat, expected, leaves):
            return None
        views = self._views(result, loop, given, variables)
        kept = next((view for view in views if loop.view in (None, view)), None)
        return None if kept is None else replace(loop, view=kept, is_detached=not result.requires_grad)

    def _has_gradients(self, found: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
        factors = torch.randn(found.shape, generator=self._generator)
        own, others = (
            torch.autograd.grad((result * factors).sum(), leaves, allow_unused=True) for result in (found, expected)
        )
        alike = [
            one is not None and other is not None and torch.allclose(one, other, atol=_TOLERANCE, rtol=_TOLERANCE)
            for one, other in zip(own, others, strict=True)
        ]
        return all(alike)

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
        variables = self._variables(region, case)
        return variables is not None and self._result(region, self._given(region, loop, case, variables)) is not None

    def _keeps_type(self, region: Region, loop: Loop) -> bool:
        """Whether numbers of the model's own type stay of it."""
        case = self._usual("spread")
        variables = self._variables(region, case, is_wide=False)
        if variables is None:
            return False
        given = {name: variables[name] for name in self._names(region, variables)}
        result = self._result(region, given, is_wide=False)
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
                value = _choices(case.pattern, self._num_experts, tuple(indices.shape), generator)
            elif isinstance(value, torch.Tensor):
                value = torch.full_like(value, float("nan"))
            given[name] = copy.copy(value) if isinstance(value, list | dict | set) else value
        return given

    def _result(
        self, region: Region, given: Mapping[str, Any], *, grad: bool = False, is_wide: bool = True
    ) -> torch.Tensor | None:
        """What the region gives; None where it fails, or changes anything that it is given."""
        module = self._standing[is_wide]
        kept = {name: _copy(value) for name, value in given.items()}
        attributes, versions = dict(vars(module)), _versions(module)
        tree = copy.copy(self._source.tree)
        names = [ast.arg(name) for name in ("self", *given)]
        tree.args = ast.arguments([], names, None, [], [], None, [])
        tree.body = region.body
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.device("cpu"):
                result = compile_part(self._source, tree)(module, **given)
        except Exception:
            # Whatever the model's own code raises outside of its model.
            return None
        is_same = all(_is_same(value, given[name]) for name, value in kept.items())
        is_same = is_same and versions == _versions(module) and attributes.keys() == vars(module).keys()
        is_same = is_same and all(vars(module)[name] is value for name, value in attributes.items())
        is_new = not any(result is value for value in given.values())
        return result if isinstance(result, torch.Tensor) and is_same and is_new else None

    def _expected(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, weigh_inputs: bool
    ) -> torch.Tensor:
        """The sum over each token's experts [T, H]."""
        rows = x.reshape(-1, self._size)
        total = torch.zeros_like(rows)
        for chosen, weight in zip(indices.T, weights.T.unsqueeze(-1), strict=True):
            expert, is_one = chosen.clamp(max=self._num_experts - 1), (chosen < self._num_experts).unsqueeze(-1)
            made = ((rows * weight if weigh_inputs else rows) * self._factors[expert]).tanh() + self._offsets[expert]
            total = total + (made if weigh_inputs else made * weight) * is_one
        return total

    def _variables(self, region: Region, case: _Case, *, is_wide: bool = True) -> dict[str, Any] | None:
        """The forward's variables where a region begins; None where it does not get there."""
        key = id(region.statements[0]), _Case(case.lengths), is_wide
        if key not in self._before:
            self._before[key] = self._captured(region.statements[0], case.lengths, is_wide)
        return self._before[key]

    def _captured(self, first: ast.stmt, lengths: tuple[int, ...], is_wide: bool) -> dict[str, Any] | None:
        tree = copy.deepcopy(self._source.tree)
        twins = dict(zip(map(id, ast.walk(self._source.tree)), ast.walk(tree), strict=True))
        stop = ast.parse("raise _captured_(locals())").body
        body = next(body for _, body in bodies(tree) if any(s is twins[id(first)] for s in body))
        body.insert(next(i for i, s in enumerate(body) if s is twins[id(first)]), stop[0])
        function = compile_part(self._source, tree, _captured_=_Captured)
        module = self._standing[is_wide]
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                function(module, **self._arguments(lengths, is_wide))
        except _Captured as found:
            return found.variables
        except Exception:
            # Whatever the model's own code raises outside of its model.
            return None
        return None

    def _arguments(self, lengths: tuple[int, ...], is_wide: bool) -> dict[str, Any]:
        """What to call the forward with, for so many tokens."""
        return {
            name: self._number(value_of(node), lengths, is_wide)
            if isinstance(node, fx.Node)
            else getattr(node, "value", node)
            for name, node in self._trace.arguments.items()
        }

    def _number(self, facts: Any, lengths: tuple[int, ...], is_wide: bool) -> Any:
        if not isinstance(facts, TensorFacts):
            return facts
        shape, count = facts.shape, len(self._lead)
        if shape[:count] == self._lead:
            shape = (*lengths, *shape[count:])
        elif shape[:1] == (math.prod(self._lead),):
            shape = (math.prod(lengths), *shape[1:])
        if facts.dtype.is_floating_point:
            return torch.randn(shape, generator=self._generator).to(torch.float32 if is_wide else facts.dtype)
        # Different numbers in a row: it may hold the experts of a token.
        return (torch.arange(math.prod(shape)).view(shape) % max(shape[-1:], default=1)).to(facts.dtype)

    def _stand_in(self, is_wide: bool) -> nn.Module:
        """A copy of the module with numbers on the CPU, and small experts."""

        def dtype(tensor: torch.Tensor) -> torch.dtype:
            return torch.float32 if is_wide else tensor.dtype

        def numbers(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or not tensor.is_floating_point():
                return tensor if tensor is None else torch.zeros(tensor.shape, dtype=tensor.dtype)
            return overlapping_numbers(tensor.shape, self._generator, dtype(tensor))

        def copied(module: nn.Module, path: str) -> nn.Module:
            twin = type(module).__new__(type(module))
            vars(twin).update(vars(module))
            for name in ("_parameters", "_buffers"):
                vars(twin)[name] = {key: numbers(tensor) for key, tensor in getattr(module, name).items()}
            vars(twin)["_modules"] = {
                key: self._standing_for(int(key), dtype(next(part.parameters())))
                if path == self._list and part is not None
                else (None if part is None else copied(part, f"{path}.{key}".lstrip(".")))
                for key, part in module._modules.items()
            }
            return twin

        with torch.inference_mode(False), torch.enable_grad():
            for tensor in (self._factors, self._offsets):
                tensor.requires_grad_()
            return copied(self._owner, "")

    def _standing_for(self, index: int, dtype: torch.dtype) -> nn.Module:
        return _Expert(self._factors[index].to(dtype), self._offsets[index].to(dtype))


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


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(), other.detach().nan_to_num())
    return bool(one == other) if isinstance(one, list | dict | set) else True


def _versions(module: nn.Module) -> list[int]:
    return [tensor._version for tensor in (*module.parameters(), *module.buffers())]
