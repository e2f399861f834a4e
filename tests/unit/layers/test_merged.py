"""Parameters that share storage: what is done to models happens to them as to any others."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from transfuse.errors import WeightsError
from transfuse.layers.merged import MergedParameter

NAMES = ("q", "k", "v")


class Joined(nn.Module):
    """Three linear layers of one input, computed as one."""

    weight = MergedParameter(NAMES, "weight")
    bias = MergedParameter(NAMES, "bias")

    def __init__(self, biases: str = "qkv") -> None:
        super().__init__()
        self.q = nn.Linear(4, 6, bias="q" in biases)
        self.k = nn.Linear(4, 2, bias="k" in biases)
        self.v = nn.Linear(4, 2, bias="v" in biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Apart(Joined):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)


def assert_shared(module: Joined) -> None:
    """The parameters are the rows of what they are joined to, in order."""
    for merged, name in ((module.weight, "weight"), (module.bias, "bias")):
        address = merged.data_ptr()
        for child in (module.q, module.k, module.v):
            part = getattr(child, name)
            if part is not None:
                assert part.data_ptr() == address
                assert torch.equal(part, merged[(address - merged.data_ptr()) // (merged[0].nbytes) :][: len(part)])
            address += child.weight.shape[0] * merged[0].nbytes


def assert_like_apart(module: Joined) -> None:
    apart = Apart()
    apart.load_state_dict(module.state_dict(), strict=False)
    for own, other in zip(module.children(), apart.children(), strict=True):
        if own.bias is None:
            other.bias = None
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(module.float()(x), apart(x))


@pytest.fixture
def module() -> Joined:
    torch.manual_seed(0)
    made = Joined()
    made.weight, made.bias  # noqa: B018  (joins them)
    return made


@pytest.mark.parametrize("biases", ["", "q", "k", "qv", "qkv"])
def test_computes_what_the_layers_do(biases: str) -> None:
    if biases:
        assert_like_apart(Joined(biases))
    else:
        assert Joined("").weight.shape == (10, 4)


def test_parameters_become_rows(module: Joined) -> None:
    assert_shared(module)
    assert module.weight.data_ptr() == module.weight.data_ptr()


def test_writes_reach_the_joined_tensor(module: Joined) -> None:
    with torch.no_grad():
        module.k.weight.fill_(3.0)
        assert module.weight[6:8].eq(3.0).all()


CHANGES: dict[str, Callable[[Joined], Any]] = {
    "to(dtype)": lambda m: m.to(torch.float64),
    "half": lambda m: m.half(),
    "bfloat16 and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "new data": lambda m: setattr(m.k.weight, "data", torch.randn(2, 4)),
    "new parameter": lambda m: setattr(m.v, "weight", nn.Parameter(torch.randn(2, 4))),
    "new child": lambda m: setattr(m, "k", nn.Linear(4, 2)),
    "another size": lambda m: setattr(m, "v", nn.Linear(4, 5)),
    "no bias any more": lambda m: setattr(m.k, "bias", None),
    "load_state_dict": lambda m: m.load_state_dict(Joined().state_dict()),
    "load_state_dict(assign)": lambda m: m.load_state_dict(Joined().state_dict(), assign=True),
    "through meta": lambda m: (m.to("meta"), m.to_empty(device="cpu"), m.load_state_dict(Joined().state_dict())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_joined_anew_where_a_parameter_changed(module: Joined, name: str) -> None:
    CHANGES[name](module)
    assert_shared(module)
    expected = torch.cat([child.weight for child in module.children()])
    with torch.no_grad():
        assert torch.equal(module.weight, expected)


def test_a_bias_that_appears_is_used() -> None:
    module = Joined("q")
    assert module.bias[6:].eq(0).all()
    module.v.bias = nn.Parameter(torch.ones(2))
    assert module.bias[6:8].eq(0).all()
    assert module.bias[8:].eq(1).all()


def test_rows_without_a_bias_stay_zero() -> None:
    module = Joined("qv")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, weight_decay=0.1)
    for _ in range(3):
        module(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    assert module.bias[6:8].eq(0).all()
    assert module.k.bias is None
    module.q.bias = None
    assert module.bias[:8].eq(0).all()


def test_a_copy_shares_nothing(module: Joined) -> None:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.q.weight.zero_()
        assert not twin.weight[:6].eq(0).any()
    assert_shared(twin)
    assert_shared(module)


@pytest.mark.parametrize("name", ["copy", "pickle"])
def test_copies_carry_no_joined_tensor(module: Joined, name: str) -> None:
    twin = copy.deepcopy(module) if name == "copy" else pickle.loads(pickle.dumps(module))
    assert set(vars(twin)) == set(vars(Joined()))
    assert_shared(twin)


def test_gradients_reach_each_parameter(module: Joined) -> None:
    apart = Apart()
    apart.load_state_dict(module.state_dict())
    x = torch.randn(3, 4)
    for one in (module, apart):
        (one(x) * torch.arange(30.0).view(3, 10)).sum().backward()
    for own, other in zip(module.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("biases", ["qkv", "v"])
def test_gradcheck(biases: str) -> None:
    module = Joined(biases).double()

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    names = [name for name, _ in module.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    assert torch.autograd.gradcheck(run, (torch.randn(2, 4, dtype=torch.float64, requires_grad=True), *values))
    assert torch.autograd.gradgradcheck(run, (torch.randn(2, 4, dtype=torch.float64, requires_grad=True), *values))


def test_frozen_parts_get_no_gradient(module: Joined) -> None:
    module.q.requires_grad_(False)
    module(torch.randn(3, 4)).sum().backward()
    assert module.q.weight.grad is None
    assert module.k.weight.grad is not None
    module.requires_grad_(False)
    assert not module(torch.randn(3, 4)).requires_grad


def test_an_optimizer_keeps_the_rows_in_place(module: Joined) -> None:
    address = module.weight.data_ptr()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(3, 4)).sum().backward()
    before = module.weight.detach().clone()
    optimizer.step()
    assert module.weight.data_ptr() == address
    assert not torch.equal(module.weight, before)
    assert_shared(module)


def test_a_weight_changed_before_the_backward_pass_is_noticed(module: Joined) -> None:
    result = module(torch.randn(3, 4)).sum()
    with torch.no_grad():
        module.k.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_joined_in_inference_mode_and_trained_later() -> None:
    module = Joined()
    with torch.inference_mode():
        module(torch.randn(3, 4))
    module(torch.randn(3, 4)).sum().backward()
    assert module.k.weight.grad is not None


def test_adjacent_parameters_are_not_moved() -> None:
    module = Joined()
    storage = torch.randn(10, 4)
    for child, rows in zip(module.children(), storage.split((6, 2, 2)), strict=True):
        child.weight.data = rows
    assert module.weight.data_ptr() == storage.data_ptr()
    assert module.weight.shape == (10, 4)


def test_files(module: Joined, tmp_path: Path) -> None:
    save_file(module.state_dict(), tmp_path / "dict")
    save_model(module, str(tmp_path / "model"))
    torch.save(module.state_dict(), tmp_path / "torch")
    loaded = [load_file(tmp_path / "dict"), load_file(tmp_path / "model")]
    loaded.append(torch.load(tmp_path / "torch", weights_only=True))
    for state in loaded:
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


def test_different_dtypes_are_told(module: Joined) -> None:
    module.k.to(torch.float64)
    with pytest.raises(WeightsError, match=r"weight of Joined's q, k, v cannot be joined: .* float64 \[2, 4\]"):
        module.weight  # noqa: B018


def test_children_of_children() -> None:
    class Deep(nn.Module):
        weight = MergedParameter(("a.q", "a.k"), "weight")

        def __init__(self) -> None:
            super().__init__()
            self.a = Joined()

    deep = Deep()
    assert torch.equal(deep.weight, torch.cat((deep.a.q.weight, deep.a.k.weight)))
    deep.a.k = nn.Linear(4, 2)
    assert torch.equal(deep.weight[6:], deep.a.k.weight)
    deep.a = Joined()
    assert torch.equal(deep.weight, torch.cat((deep.a.q.weight, deep.a.k.weight)))


def test_nothing_stays_of_a_module_that_is_gone() -> None:
    kept = Joined.weight._joined
    module = Joined()
    module.weight  # noqa: B018
    assert id(module) in kept
    key = id(module)
    del module
    gc.collect()
    assert key not in kept
