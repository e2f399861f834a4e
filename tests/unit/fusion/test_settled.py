"""What is known of a module's attributes: nothing that code, or the place in a list, may change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fusion import custom_models as models
from tests.unit.fusion.conftest import Fused, hidden, reasons
from transfuse.fusion.settled import settled_of
from transfuse.rewrite.fold import Found

KNOWN: dict[str, bool | int | Found | None] = {
    "linear": Found.PRESENT,
    "no_child": None,
    "weight": Found.PRESENT,
    "no_weight": None,
    "buffer": Found.PRESENT,
    "no_buffer": None,
    "flag": True,
    "number": 3,
    "nothing": None,
    "name": "x",
    "rate": 0.5,
    "of_class": False,
    "never": Found.ABSENT,
    "linear.bias": None,
    "linear.in_features": 4,
}
UNKNOWN = (
    "training layer_idx forward counted lazy_flag by_helper cached by_setattr by_function deleted registered _modules "
    "asks linear.training name.x never.x no_child.x changed_outside"
).split()


def _mark(layer: Any) -> None:
    layer.by_function = True


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Layer(nn.Module):
    of_class = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_module("no_child", None)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_parameter("no_weight", None)
        self.register_buffer("buffer", torch.ones(4))
        self.register_buffer("no_buffer", None)
        self.flag, self.number, self.nothing, self.name, self.rate = True, 3, None, "x", 0.5
        self.layer_idx, self.counted, self.lazy_flag, self.by_helper = 2, 0, False, None
        self.by_setattr, self.by_function, self.deleted, self.changed_outside = False, False, 1, True
        self.registered = None

    @property
    def asks(self) -> bool:
        self.counted += 1
        return True

    @functools.cached_property
    def cached(self) -> bool:
        return True

    def _prepare(self) -> None:
        self.lazy_flag = True
        setattr(self, "by_setattr", True)  # noqa: B010
        self.register_buffer("registered", torch.ones(1))
        del self.deleted

    @_wrapped
    def _help(self) -> None:
        def inner() -> None:
            self.by_helper = 1

        inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.changed_outside = False
        return self.layer(x)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("path", KNOWN)
def test_parts_and_plain_settings_are_known(path: str, model: Model) -> None:
    found = settled_of(model.layer, model)(tuple(path.split(".")))
    assert (type(found), found) == (type(KNOWN[path]), KNOWN[path])


@pytest.mark.parametrize("path", UNKNOWN)
def test_what_may_change_is_not(path: str, model: Model) -> None:
    assert settled_of(model.layer, model)(tuple(path.split("."))) is Found.UNKNOWN
    assert not model.layer.counted


def test_attributes_that_a_class_makes_up() -> None:
    class Made(Layer):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    made = Made()
    assert settled_of(made, made)(("flag",)) is Found.UNKNOWN


@pytest.mark.parametrize("has_value", [False, True])
def test_a_guard_on_a_part_is_gone_from_the_rewritten_forward(has_value: bool, fused_alike: Fused) -> None:
    plan = fused_alike(models.OptionalValue(has_value), hidden())
    source = plan.kinds[0].source
    assert source is not None, reasons(plan)
    assert " if self.wv" not in source
    assert ("v = wv_out" if has_value else "v = k") in source
    assert "if only_query:" in source
