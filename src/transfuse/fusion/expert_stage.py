"""Runs parts of a forward by themselves, with small experts in the place of its own and numbers on the CPU."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.evaluate import overlapping_numbers
from transfuse.fusion.expert_loop import Region
from transfuse.rewrite.compiled import compile_part
from transfuse.rewrite.scope import bodies
from transfuse.rewrite.source import MethodSource, RewriteRefused
from transfuse.trace.graph import TensorFacts, Trace, value_of


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


class Stage:
    """A module whose experts are stood in for.

    Args:
        trace: of the module.
        owner: the module.
        source: of its forward.
        experts: path of the list of its experts.
        size: of a token.

    Attributes:
        num_experts: in the list.
        parameters: of the experts that stand in.

    Raises:
        RewriteRefused: the module is not given tokens.
    """

    def __init__(self, trace: Trace, owner: nn.Module, source: MethodSource, experts: str, size: int) -> None:
        self._trace, self._owner, self._source = trace, owner, source
        self._list, self._size = experts, size
        self.num_experts = len(owner.get_submodule(experts)._modules)
        self._generator = torch.Generator().manual_seed(0)
        tokens = next((f for f in map(value_of, trace.arguments.values()) if self._holds_tokens(f)), None)
        if tokens is None:
            raise RewriteRefused(f"{type(owner).__name__} is not given tokens ({source.where()})")
        self._lead = tokens.shape[:-1]
        self._before: dict[tuple[int, tuple[str, ...], tuple[int, ...], bool], dict[str, Any] | None] = {}
        with torch.inference_mode(False), torch.enable_grad():
            self.parameters = [
                torch.randn(self.num_experts, size, generator=self._generator).requires_grad_() for _ in range(2)
            ]
            self._modules = {is_wide: self._stand_in(owner, "", is_wide) for is_wide in (True, False)}

    def _holds_tokens(self, facts: Any) -> bool:
        is_numbers = isinstance(facts, TensorFacts) and facts.dtype.is_floating_point
        return is_numbers and len(facts.shape) > 1 and facts.shape[-1] == self._size

    def lengths(self, count: int, rows: int = 1) -> tuple[int, ...]:
        """So many tokens, or a few more, in as many dimensions as the module is given."""
        if len(self._lead) == 1:
            return (count,)
        return (*(1,) * (len(self._lead) - 2), rows, -(-count // rows))

    def variables(self, region: Region, lengths: tuple[int, ...], *, is_wide: bool = True) -> dict[str, Any] | None:
        """The forward's variables where a region begins; None where it does not get there.

        Args:
            region: a part of the forward.
            lengths: of the tokens that it is given.
            is_wide: whether numbers are float32, or of the model's own type.
        """
        key = id(region.statements[0]), tuple(region.arguments), lengths, is_wide
        if key not in self._before:
            self._before[key] = self._captured(region, lengths, is_wide)
        return self._before[key]

    def run(
        self, region: Region, given: Mapping[str, Any], *, grad: bool = False, is_wide: bool = True
    ) -> torch.Tensor | None:
        """What a region gives; None where it fails, or changes anything that it is given.

        Args:
            region: a part of the forward.
            given: the variables that it reads.
            grad: whether gradients are to reach these.
            is_wide: see `variables`.
        """
        module = self._modules[is_wide]
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

    def expected(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *, weigh_inputs: bool
    ) -> torch.Tensor:
        """The sum over each token's experts [T, H]; experts beyond the last give nothing."""
        factors, offsets = self.parameters
        with torch.enable_grad():
            rows = x.reshape(-1, self._size)
            total = torch.zeros_like(rows)
            for chosen, weight in zip(indices.T, weights.T.unsqueeze(-1), strict=True):
                expert, is_one = chosen.clamp(max=self.num_experts - 1), (chosen < self.num_experts).unsqueeze(-1)
                made = ((rows * weight if weigh_inputs else rows) * factors[expert]).tanh() + offsets[expert]
                total = total + (made if weigh_inputs else made * weight) * is_one
            return total

    def _captured(self, region: Region, lengths: tuple[int, ...], is_wide: bool) -> dict[str, Any] | None:
        first = region.statements[0]
        tree = copy.deepcopy(self._source.tree)
        twins = dict(zip(map(id, ast.walk(self._source.tree)), ast.walk(tree), strict=True))
        body = next(body for _, body in bodies(tree) if any(s is twins[id(first)] for s in body))
        index = next(i for i, s in enumerate(body) if s is twins[id(first)])
        computed = "".join(f", {name}={ast.unparse(value)}" for name, value in region.arguments.items())
        body.insert(index, ast.parse(f"raise _captured_(dict(locals(){computed}))").body[0])
        function = compile_part(self._source, tree, _captured_=_Captured)
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                function(self._modules[is_wide], **self._arguments(lengths, is_wide))
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

    def _stand_in(self, module: nn.Module, path: str, is_wide: bool) -> nn.Module:
        """A copy of a module of which experts are a part or not, with other numbers, and small experts."""
        twin = type(module).__new__(type(module))
        vars(twin).update(vars(module))
        for name in ("_parameters", "_buffers"):
            vars(twin)[name] = {
                key: None if tensor is None else self._numbers(tensor, is_wide)
                for key, tensor in getattr(module, name).items()
            }
        children: dict[str, nn.Module | None] = {}
        for index, (key, part) in enumerate(module._modules.items()):
            if part is None:
                children[key] = None
            elif path == self._list and isinstance(module, nn.ModuleList):
                dtype = torch.float32 if is_wide else next(part.parameters()).dtype
                children[key] = _Expert(*(parameter[index].to(dtype) for parameter in self.parameters))
            else:
                children[key] = self._stand_in(part, f"{path}.{key}".lstrip("."), is_wide)
        vars(twin)["_modules"] = children
        return twin

    def _numbers(self, tensor: torch.Tensor, is_wide: bool) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return overlapping_numbers(tensor.shape, self._generator, torch.float32 if is_wide else tensor.dtype)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(), other.detach().nan_to_num())
    return bool(one == other) if isinstance(one, list | dict | set) else True


def _versions(module: nn.Module) -> list[int]:
    return [tensor._version for tensor in (*module.parameters(), *module.buffers())]
