from __future__ import annotations

import torch
from torch import nn

from transfuse.verify.recording import Recorder, Site
from transfuse.verify.replay import Place, replaying


class Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.factor) + x


class Model(nn.Module):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(factor) for factor in factors)
        for block in self.layers:
            block.inner.weight.data.fill_(0.5)

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(input_ids, 3).float()
        for layer in self.layers:
            x = layer(x)
        return x


class Entry:
    def __init__(self, name: str, start: int, num_tokens: int) -> None:
        self.request, self.start, self.num_tokens = self, start, num_tokens
        self.request_id = name


class Batch:
    def __init__(self, *entries: Entry) -> None:
        self.entries = entries


def errors(served: nn.Module, original: nn.Module) -> dict[str, float]:
    """The largest error at each place, for a request that is packed after another one and then goes on."""
    recorder = Recorder(served)
    with torch.no_grad(), recorder.listening() as recording:
        recorder.begin(Batch(Entry("other", 0, 2), Entry("mine", 0, 3)))
        served(input_ids=torch.tensor([[2, 2, 0, 1, 2]]))
        recorder.begin(Batch(Entry("mine", 3, 1)))
        served(input_ids=torch.tensor([[1]]))
    found: dict[str, float] = {}

    def listen(place: Place, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        found[f"{place.path}: {place}"] = float((mine - theirs).abs().max())

    with torch.no_grad(), replaying(original, recording, "mine", listen):
        original(input_ids=torch.tensor([[0, 1, 2, 1]]))
    return found


def test_equal_models_have_no_error_anywhere() -> None:
    found = errors(Model(1.0, 2.0), Model(1.0, 2.0))
    assert len(found) == 9
    assert set(found.values()) == {0.0}


def test_an_error_shows_where_it_is_made_and_not_after() -> None:
    found = errors(Model(1.0, 3.0, 1.0), Model(1.0, 2.0, 1.0))
    assert {place for place, error in found.items() if error > 0} == {"layers.1: before layers.1.inner (input)"}


def test_a_child_that_the_served_model_does_not_call_counts_as_its_parent() -> None:
    served = Model(1.0, 1.0)
    block = served.layers[1]
    block.forward = lambda x: nn.functional.linear(x, block.inner.weight * 2) + x
    found = errors(served, Model(1.0, 1.0))
    assert {place for place, error in found.items() if error > 0} == {"layers.1: result"}
    assert not any(place.startswith("layers.1.inner") for place in found)


def test_the_name_of_a_place_says_what_is_wrong() -> None:
    assert str(Place("a", Site("a.b", 0, "in", "position_ids"))) == "before a.b (position_ids)"
    assert str(Place("a", Site("a", 0, "out", ".0"))) == "result (0)"
