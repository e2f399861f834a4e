"""Layers that keep a state: on which requests of a row they run at once, and that none meets another's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from transfuse.cache.state_cache import StateCache, StateSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_cache import RequestRows
from transfuse.layers.state_layer import StateGroup, StateLayer, decode_group, keeping_states, state_groups

WIDTH = 3
SPECS = [
    StateSpec(0, 0, "conv_states", (WIDTH, 2), torch.float32),
    StateSpec(0, 0, "recurrent_states", (WIDTH,), torch.float32),
    StateSpec(1, 0, "conv_states", (WIDTH, 2), torch.float32),
    StateSpec(1, 0, "recurrent_states", (WIDTH,), torch.float32),
]


class Row(LayerProbe):
    """A row over `cache`; without one, a row of one request, as when layers are looked at."""

    def __init__(
        self, num_tokens: int = 0, cache: StateCache | None = None, requests: Sequence[RequestRows] = (), rows: Any = ()
    ) -> None:
        super().__init__(num_tokens=num_tokens)
        self._probed = StateCache(SPECS, 1)
        self._row = cache, requests, rows

    def state_groups(self) -> list[StateGroup]:
        cache, requests, rows = self._row
        assert cache is not None
        return state_groups(cache, requests, rows)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        return nn.functional.pad(conv_states, (max(0, 2 - conv_states.shape[-1]), 0))

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        return recurrent_states


class Recurrence(nn.Module):
    """Adds each token to the one before it, and halves and adds up what comes; writes down what it was called with."""

    def __init__(self, reads: str = "all") -> None:
        super().__init__()
        self.reads = reads
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, *, cache: Any, layer: int = 0, factor: Any = None) -> Any:
        self.seen.append(tuple(x.shape[:2]))
        recurrent = cache.get_recurrent_state(layer)
        begins = recurrent is None or (self.reads == "single" and x.shape[1] > 1)
        total = x.new_zeros(len(x), WIDTH) if begins else recurrent.clone()
        inputs = cache.update_conv_state(x.transpose(1, 2), layer, conv_kernel_size=2).transpose(1, 2)
        before = nn.functional.pad(inputs, (0, 0, 1, 0))[:, :-1]
        mixed = (inputs + before)[:, -x.shape[1] :]
        if factor is not None:
            mixed = mixed * factor.unsqueeze(-1)
        results = []
        for token in mixed.unbind(1):
            total = total / 2 + token
            results.append(total)
        cache.update_recurrent_state(total, layer)
        return torch.stack(results, 1), None, {"same": x, "cache": cache}


def texts(*lengths: int) -> list[torch.Tensor]:
    return list(torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(3)).split(lengths))


def alone(text: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Recurrence()(text.unsqueeze(0), cache=Row(len(text)))[0][0]
    return result


def settled(layer: StateLayer, module: nn.Module, /, **more: Any) -> None:
    """Show it two rows, of 4 and of 5 tokens."""
    for count in (4, 5):
        given = {name: make(count) for name, make in more.items()}
        module(torch.randn(1, count, WIDTH), cache=Row(count), **given)
    layer.settle(SPECS)
    module.seen.clear()


def run_steps(module: Any, whole: list[torch.Tensor], steps: list[list[tuple[int, int]]], rows: list[int]) -> Any:
    """Results of each text; a step holds pairs of a text and how many of its tokens come next."""
    cache = StateCache(SPECS, 8)
    for tensor in cache.tensors.values():
        tensor.fill_(torch.nan)
    cache.zero_rows(rows)
    past = [0] * len(whole)
    found: list[list[torch.Tensor]] = [[] for _ in whole]
    for step in steps:
        requests, parts, start = [], [], 0
        for index, (text, count) in enumerate(step):
            requests.append(RequestRows(index, start, start + count, past[text]))
            parts.append(whole[text][past[text] : past[text] + count])
            start += count
            past[text] += count
        # Padded by a token of no request.
        x = torch.cat((*parts, torch.full((1, WIDTH), 7.0))).unsqueeze(0)
        row = Row(start + 1, cache, requests, [rows[text] for text, _ in step])
        result, none, named = module(x, cache=row)
        assert none is None and named["cache"] is row
        assert torch.equal(named["same"][:, :start], x[:, :start])
        assert (result[:, start:] == 0).all()
        for request, (text, _) in zip(requests, step, strict=True):
            found[text].append(result[0, request.start : request.stop])
    return [torch.cat(parts) for parts in found]


STEPS = [
    [(0, 3), (1, 1), (2, 4)],
    [(0, 1), (1, 1), (2, 2)],
    [(1, 1), (2, 1), (0, 1), (3, 5)],
    [(3, 1), (0, 1), (1, 1)],
    [(2, 1), (0, 2), (1, 2), (3, 1)],
]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 2, 1, 0], [6, 1, 4, 3]])
def test_each_request_goes_on_from_its_own_state(rows: list[int]) -> None:
    whole = texts(8, 6, 8, 7)
    module = Recurrence()
    with keeping_states([module]) as (layer,):
        settled(layer, module)
        assert layer.continues_texts
        for result, text in zip(run_steps(module, whole, STEPS, rows), whole, strict=True):
            torch.testing.assert_close(result, alone(text))
    # All that continue by one token run at once, whatever their places in the row; the others each by itself.
    assert module.seen[:3] == [(1, 3), (1, 1), (1, 4)]
    assert module.seen[3:7] == [(2, 1), (1, 2), (3, 1), (1, 5)]
    assert module.seen[7:] == [(3, 1), (2, 1), (1, 2), (1, 2)]
    assert "forward" not in vars(module)


def test_code_that_begins_anew_with_several_tokens_is_given_one_after_the_other() -> None:
    whole = texts(8, 6, 8, 7)
    module = Recurrence(reads="single")
    with keeping_states([module]) as (layer,):
        settled(layer, module)
        assert not layer.continues_texts
        for result, text in zip(run_steps(module, whole, STEPS, [4, 0, 2, 7]), whole, strict=True):
            torch.testing.assert_close(result, alone(text))
    assert module.seen[:6] == [(1, 3), (1, 1), (1, 4), (2, 1), (1, 1), (1, 1)]


def test_what_comes_with_the_tokens_is_parted_with_them() -> None:
    whole = texts(5, 4)
    module, cache = Recurrence(), StateCache(SPECS, 2)
    with keeping_states([module]) as (layer,):
        settled(layer, module, factor=lambda count: torch.ones(1, count))
        factors = torch.tensor([[1.0, 2, 3, 4, 1, 2, 3]])
        requests = [RequestRows(0, 0, 4, 0), RequestRows(1, 4, 7, 0)]
        x = torch.cat((whole[0][:4], whole[1][:3])).unsqueeze(0)
        first, _, _ = module(x, cache=Row(7, cache, requests, [0, 1]), factor=factors)
        requests = [RequestRows(0, 0, 1, 4), RequestRows(1, 1, 2, 3)]
        x = torch.stack((whole[0][4], whole[1][3])).unsqueeze(0)
        second, _, _ = module(x, cache=Row(2, cache, requests, [0, 1]), factor=torch.tensor([[5.0, 6]]))
    for text, results, factor in (
        (whole[0], (first[0, :4], second[0, :1]), [1.0, 2, 3, 4, 5]),
        (whole[1], (first[0, 4:], second[0, 1:]), [1.0, 2, 3, 6]),
    ):
        expected, _, _ = Recurrence()(text[None], cache=Row(len(text)), factor=torch.tensor([factor]))
        torch.testing.assert_close(torch.cat(results), expected[0])


def test_a_whole_row_of_single_tokens_is_one_call_over_rows_of_its_own() -> None:
    class Decodes(Row):
        def state_groups(self) -> list[StateGroup]:
            assert self._row[0] is not None
            return [decode_group(self._row[0])]

    whole, module, cache = texts(4, 5, 3), Recurrence(), StateCache(SPECS, 5)
    cache.zero_rows(range(5))
    with keeping_states([module]) as (layer,):
        settled(layer, module)
        for index, text in enumerate(whole):
            requests = [RequestRows(0, 0, len(text) - 1, 0)]
            module(text[None, :-1], cache=Row(len(text) - 1, cache, requests, [index + 1]))
        module.seen.clear()
        with cache.together([1, 2, 3]) as lent:
            x = torch.stack([text[-1] for text in whole])[None]
            result, _, named = module(x, cache=Decodes(3, lent))
        assert module.seen == [(3, 1)] and named["same"].data_ptr() == x.data_ptr(), "nothing was copied"
    torch.testing.assert_close(result[0], torch.stack([alone(text)[-1] for text in whole]))
    for tensor in cache.tensors.values():
        assert (tensor[[0, 4]] == 0).all()


def test_states_are_those_of_the_call_not_of_the_module() -> None:
    """A looped model calls one module for several layers."""
    (text,) = texts(6)
    module, cache = Recurrence(), StateCache(SPECS, 1)
    with keeping_states([module]) as (layer,):
        settled(layer, module, layer=lambda count: 0)
        found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            row = Row(stop - start, cache, [RequestRows(0, 0, stop - start, start)], [0])
            for loop, scale in ((0, 1.0), (1, -2.0)):
                found[loop].append(module(text[None, start:stop] * scale, cache=row, layer=loop)[0][0])
    torch.testing.assert_close(torch.cat(found[0]), alone(text))
    torch.testing.assert_close(torch.cat(found[1]), alone(text * -2))


def test_what_cannot_be_parted_for_several_requests_is_refused() -> None:
    class Flat(Recurrence):
        def forward(self, x: torch.Tensor, *, cache: Any, **more: Any) -> Any:
            return super().forward(x, cache=cache)

    module, cache = Flat(), StateCache(SPECS, 2)
    with keeping_states([module]) as (layer,):
        settled(layer, module, more=torch.ones)
        requests = [RequestRows(0, 0, 1, 4), RequestRows(1, 1, 2, 3)]
        with pytest.raises(UnsupportedModelError, match=r"a tensor of \(2,\) cannot be parted by requests"):
            module(torch.ones(1, 2, WIDTH), cache=Row(2, cache, requests, [0, 1]), more=torch.ones(2))


def test_a_layer_that_was_not_seen_before_is_refused() -> None:
    module, cache = Recurrence(), StateCache(SPECS, 1)
    with keeping_states([module]) as (layer,):
        settled(layer, module, layer=lambda count: 0)
        row = Row(1, cache, [RequestRows(0, 0, 1, 4)], [0])
        with pytest.raises(UnsupportedModelError, match="forward is not called as in the first forward"):
            module(torch.ones(1, 1, WIDTH), cache=row)
        with pytest.raises(UnsupportedModelError, match="layer 5 keeps a state now, and did not in the first"):
            module(torch.ones(1, 1, WIDTH), cache=row, layer=5)


def test_other_calls_to_the_cache_are_refused_by_name() -> None:
    class Attends(Recurrence):
        def forward(self, x: torch.Tensor, *, cache: Any) -> Any:
            result = super().forward(x, cache=cache)
            if not isinstance(cache, Row):
                cache.update(x, x, 0)
            return result

    module = Attends()
    with (
        keeping_states([module]) as (layer,),
        pytest.raises(UnsupportedModelError, match=r"a layer that keeps a state reads Cache\.update"),
    ):
        settled(layer, module)
