"""Parameters of several modules that lie in one piece of storage, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from transfuse.errors import WeightsError


class MergedParameter:
    """A class attribute: the joined rows of parameters of an object's children.

    The parameters stay where they are named, and become row views of the joined storage: what writes into them writes
    into it, and it costs no memory of its own. Where something has put another tensor in the place of a parameter
    (`.to()`, `load_state_dict(assign=True)`, `deepcopy`), the rows are joined anew at the next use.

    A child without the parameter (no bias beside others that have one) has rows of zeros.

    Args:
        children: names of the modules, in the order of their rows; each has a `weight`.
        parameter: the parameter's name in each.
    """

    def __init__(self, children: Sequence[str], parameter: str) -> None:
        self.children = tuple(children)
        self.parameter = parameter
        # By identity of the module. Kept here and not by the modules: what copies or saves a module shall not find it.
        self._joined: dict[int, _Joined] = {}

    def __repr__(self) -> str:
        return f"MergedParameter({self.children!r}, {self.parameter!r})"

    def parts(self, module: nn.Module) -> list[nn.Parameter | None]:
        """The parameters, in order."""
        return [getattr(module.get_submodule(name), self.parameter) for name in self.children]

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        """The joined tensor [sum of rows, ...]; where gradients are wanted, they reach each parameter.

        Raises:
            WeightsError: the parameters cannot be joined.
        """
        if module is None:
            return self
        joined = self._joined.get(id(module))
        if joined is None or not joined.holds():
            joined = self._join(module)
        if torch.is_grad_enabled() and joined.needs_gradient():
            return _Gradients.apply(joined.tensor, joined.counts, *joined.parameters())  # type: ignore[no-untyped-call]
        return joined.tensor

    def _join(self, module: nn.Module) -> _Joined:
        key, kept = id(module), self._joined
        joined = kept[key] = _Joined(module, self.children, self.parameter)
        if not joined.tensor.is_meta:
            # A number may be given to another object when this one is gone.
            joined.owner = weakref.ref(module, lambda _: kept.pop(key, None))
        else:
            # Tensors without storage cannot be told apart by where they lie.
            del kept[key]
        return joined


class _Joined:
    """A joined tensor, with its parts and where they lay.

    Attributes:
        tensor: the rows of all parts.
        counts: rows of each part.
        owner: keeps track of the module that has the parts.
    """

    def __init__(self, module: nn.Module, children: Sequence[str], parameter: str) -> None:
        self.owner: object = None
        self._name = parameter
        # Every module on the way to a part, by the mapping that another one would be put into.
        self._links: list[tuple[dict[str, Any], str, nn.Module]] = []
        modules: list[Any] = []
        known: set[int] = set()
        for path in children:
            here: Any = module
            for name in path.split("."):
                link = here._modules, name, here._modules[name]
                here = link[2]
                if id(here) not in known:
                    known.add(id(here))
                    self._links.append(link)
            modules.append(here)
        self._homes = [child._parameters for child in modules]
        self.counts = [int(child.weight.shape[0]) for child in modules]
        where = f"{type(module).__name__}'s {', '.join(children)}"
        self.tensor = _join(self.parameters(), self.counts, f"{parameter} of {where}")
        self._parts = [
            (home, None if part is None else part.data_ptr())
            for home, part in zip(self._homes, self.parameters(), strict=True)
        ]

    def parameters(self) -> list[nn.Parameter | None]:
        """The parts, in order; None where a child has none."""
        return [home[self._name] for home in self._homes]

    def holds(self) -> bool:
        """Whether the parts still are the rows of the joined tensor. Runs for every fused layer in every step."""
        for siblings, name, child in self._links:
            if siblings.get(name) is not child:
                return False
        for home, address in self._parts:
            part = home.get(self._name)
            # Nothing else can lie where a part lay as long as the joined tensor lives.
            if (None if part is None else part.data_ptr()) != address:
                return False
        return True

    def needs_gradient(self) -> bool:
        """Whether a part is trained."""
        for home in self._homes:
            part = home.get(self._name)
            if part is not None and part.requires_grad:
                return True
        return False


def _join(parts: Sequence[nn.Parameter | None], counts: Sequence[int], what: str) -> torch.Tensor:
    """One tensor of all rows, of which the parts become views."""
    given = [part for part in parts if part is not None]
    if len({(part.dtype, part.device, part.shape[1:]) for part in given}) != 1:
        kinds = ", ".join(f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)} on {p.device}" for p in given)
        raise WeightsError(f"{what} cannot be joined: they are {kinds}")
    # What is made in inference mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        joined = _adjacent(given) if len(given) == len(parts) else None
        if joined is not None:
            return joined
        joined = torch.zeros(sum(counts), *given[0].shape[1:], dtype=given[0].dtype, device=given[0].device)
        for part, rows in zip(parts, torch.split(joined, list(counts)), strict=True):
            if part is not None:
                rows.copy_(part)
                # A storage of its own over the same memory: a view of the whole would not be saved by itself.
                part.data = rows if rows.is_meta else from_dlpack(rows)
    return joined


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view over parts of one storage that lie one after the other, as the loader places them, or None."""
    first = parts[0].detach()
    storage, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        lies_here = part.untyped_storage().data_ptr() == storage and part.data_ptr() == address
        if part.is_meta or not lies_here or not part.is_contiguous():
            return None
        address += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


class _Gradients(torch.autograd.Function):
    """The joined tensor as a function of its parts."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor, counts: list[int], *parts: torch.Tensor | None) -> torch.Tensor:
        ctx.counts = counts
        ctx.parts = parts
        ctx.versions = [None if part is None else part._version for part in parts]
        return joined.view_as(joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The parts share the joined tensor's storage, not its version, by which autograd would see this.
        if ctx.versions != [None if part is None else part._version for part in ctx.parts]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "a weight was changed between the forward and the backward pass"
            )
        rows = torch.split(gradient, ctx.counts)
        return None, None, *(part if own is not None else None for part, own in zip(rows, ctx.parts, strict=True))
