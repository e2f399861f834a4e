"""Which modules are of one kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from transfuse.trace.structure import call_signature, has_hooks, structure_of


class Layer(nn.Module):
    def __init__(self, index: int = 0, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, settings.pop("size", 4), bias=settings.pop("bias", True))
        self.layer_idx = index
        for name, value in settings.items():
            setattr(self, name, value)

    def method(self) -> None:
        pass


def num_kinds(*layers: nn.Module) -> int:
    root = nn.Module()
    root.layers = nn.ModuleList(layers)
    kinds = structure_of(root)
    return len({kinds[id(layer)] for layer in layers})


def test_layers_that_differ_in_their_index_alone() -> None:
    assert num_kinds(*(Layer(index) for index in range(4))) == 1
    assert num_kinds(Layer(0), Layer(0)) == 2


SAME: dict[str, Callable[[], Any]] = {
    "a function": lambda: functional.silu,
    "a partial": lambda: functools.partial(functional.gelu, approximate="tanh"),
    "a list": lambda: [1, (2, "x")],
    "a dict": lambda: {"a": [1.5]},
    "an object": lambda: SimpleNamespace(size=3, names=["a"]),
    "a tensor": lambda: torch.ones(3),
    "a set": lambda: {1, 2},
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a number": (1.0, 2.0),
    "a type of number": (1, 1.0),
    "a flag": (True, False),
    "a function": (functional.silu, functional.gelu),
    "a partial": (functools.partial(functional.gelu), functools.partial(functional.gelu, approximate="tanh")),
    "a list": ([1, 2], [1, 3]),
    "a dict": ({"a": 1}, {"b": 1}),
    "an object": (SimpleNamespace(size=3), SimpleNamespace(size=4)),
    "a tensor's size": (torch.ones(3), torch.ones(4)),
    "a class": (int, float),
}


@pytest.mark.parametrize("name", SAME)
def test_settings_that_are_the_same(name: str) -> None:
    assert num_kinds(*(Layer(index, setting=SAME[name]()) for index in range(2))) == 1


@pytest.mark.parametrize("name", DIFFERENT)
def test_settings_that_differ(name: str) -> None:
    assert num_kinds(*(Layer(index, setting=value) for index, value in enumerate(DIFFERENT[name]))) == 2


def test_methods_of_the_layer_itself() -> None:
    layers = [Layer(0), Layer(1)]
    for layer in layers:
        layer.activation = layer.method
    assert num_kinds(*layers) == 1


def test_a_setting_that_holds_itself() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert num_kinds(Layer(0, setting=value), Layer(1, setting=value)) == 1


@pytest.mark.parametrize("settings", [{"size": 5}, {"bias": False}])
def test_shapes(settings: dict[str, Any]) -> None:
    assert num_kinds(Layer(0), Layer(1, **settings)) == 2


def test_a_child_that_is_none_and_one_that_is_not_there() -> None:
    layer = Layer(1)
    layer.register_module("norm", None)
    assert num_kinds(Layer(0), layer) == 2


def test_modes_dtypes_and_hooks() -> None:
    assert num_kinds(Layer(0), Layer(1).eval()) == 2
    assert num_kinds(Layer(0), Layer(1).half()) == 2
    hooked = Layer(1)
    hooked.linear.register_forward_hook(lambda *_: None)
    assert num_kinds(Layer(0), hooked) == 2
    assert has_hooks(hooked.linear)
    assert not has_hooks(hooked)


def test_a_forward_of_the_objects_own() -> None:
    replaced = Layer(1)
    replaced.forward = lambda x: x
    assert num_kinds(Layer(0), replaced) == 2


def test_signatures() -> None:
    x, cache = torch.ones(2, 3), object()
    assert call_signature((x, {"a": [1]})) == call_signature((torch.zeros(2, 3), {"a": [1]}))
    assert call_signature(x) != call_signature(x.half())
    assert call_signature(1) != call_signature(True)
    assert call_signature(cache) == call_signature(cache)
    assert call_signature(object()) != call_signature(object())
    assert call_signature(SimpleNamespace()) == call_signature(SimpleNamespace())
