"""Tells which modules of a model are of one kind: the same code over the same sizes and settings."""

from __future__ import annotations

import functools
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, Enum)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
# What every module has; its tensors, children and hooks are looked at by themselves.
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 6


def structure_of(root: nn.Module) -> dict[int, int]:
    """A number for each module below `root`, by identity, equal for modules of one kind.

    A module's kind is its class, its settings, the shapes of its parameters and buffers, and the kinds of its children.
    A setting that only numbers the module in a list of layers does not count.
    """
    visit = _Visit()
    visit.module(root, None)
    return visit.found


def numbers_place(name: str, value: object) -> bool:
    """Whether a setting may only number its module in a list of layers."""
    return type(value) is int and name.endswith(("idx", "index", "id"))


def has_hooks(module: nn.Module) -> bool:
    """Whether more than its forward happens when a module is called."""
    return any(getattr(module, name) for name in _HOOKS)


class _Visit:
    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._kinds: dict[object, int] = {}
        self._settings: dict[int, object] = {}

    def module(self, module: nn.Module, index: int | None) -> int:
        if id(module) in self.found:
            return self.found[id(module)]
        is_list = isinstance(module, nn.ModuleList)
        children = tuple(
            # Of the modules of a list only what they are counts, and in which order.
            (name, None if child is None else self.module(child, int(name) if is_list and name.isdigit() else index))
            for name, child in module._modules.items()
        )
        tensors = tuple(
            (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
        )
        hooks = tuple(len(getattr(module, name)) for name in _HOOKS)
        key = (type(module), self._own_settings(module, index), tensors, children, hooks)
        self.found[id(module)] = self._kinds.setdefault(key, len(self._kinds))
        return self.found[id(module)]

    def _own_settings(self, module: nn.Module, index: int | None) -> tuple[tuple[str, object], ...]:
        """Attributes, less those that are the module's place in a list."""
        return tuple(
            (name, self._setting(value, _DEPTH))
            for name, value in sorted(vars(module).items())
            if name not in INTERNAL and not (index is not None and numbers_place(name, value) and value == index)
        )

    def _setting(self, value: Any, depth: int) -> object:
        """Something that is equal for settings that mean the same."""
        if isinstance(value, _SCALARS):
            return type(value), value
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        if isinstance(value, _FUNCTIONS):
            return value
        if depth == 0 or isinstance(value, nn.Module):
            return type(value), id(value)
        if id(value) not in self._settings:
            self._settings[id(value)] = self._compound(value, depth - 1)
        return self._settings[id(value)]

    def _compound(self, value: Any, depth: int) -> object:
        if isinstance(value, MethodType):
            return value.__func__, type(value.__self__)
        if isinstance(value, functools.partial):
            return value.func, self._setting(value.args, depth), self._setting(value.keywords, depth)
        if isinstance(value, tuple | list):
            return type(value), tuple(self._setting(item, depth) for item in value)
        if isinstance(value, dict):
            return type(value), tuple((str(key), self._setting(item, depth)) for key, item in value.items())
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self._setting(item, depth) for item in value)
        if hasattr(value, "__dict__"):
            return type(value), self._setting(vars(value), depth)
        return type(value), id(value)


def call_signature(value: Any) -> object:
    """What of a call's arguments may change what a forward does: shapes, plain values, kinds of objects."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple | list):
        return tuple(map(call_signature, value))
    if isinstance(value, dict):
        return tuple((key, call_signature(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return type(value)
    # Masks say which pattern they stand for, and are equal where it is the same; other objects are themselves.
    return value
