"""A copy of a model without numbers, to be analysed."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import nn

from transfuse.trace.structure import has_hooks

# The mappings of `nn.Module` that hold its hooks and what is known of them.
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def meta_twin(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers are on `meta`; it takes no memory for them, wherever they are.

    Hooks are replaced by one that does nothing: what they do is for numbers, but that they are there matters.
    """
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    for part in module.modules():
        for name in _HOOKS:
            memo[id(getattr(part, name))] = OrderedDict()
    with torch.no_grad():
        twin = copy.deepcopy(module, memo)
    for part, own in zip(module.modules(), twin.modules(), strict=True):
        if has_hooks(part):
            own.register_forward_hook(_nothing)
    return twin


def _nothing(module: nn.Module, args: object, output: object) -> None:
    """A hook that leaves the output as it is."""
