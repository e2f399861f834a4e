"""Layers that run on one request at a time: which, on what, and how their results are joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.driven import BLOCK_SIZE, Driven, logits_of, random_prompts
from tests.zoo import build
from transfuse.config import ModelConfig
from transfuse.engine.choice import choose
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model
from transfuse.layers.apart import apart, layer_to_blame, runs_alone
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_cache import RequestRows
from transfuse.layers.ragged_mask import RaggedMask

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = (RequestRows(0, 0, 1, 4), RequestRows(1, 1, 4, 0))


class Row(LayerProbe):
    """A cache of the step whose requests are `ROWS`, or, while layers are looked at, one."""

    def __init__(self, num_tokens: int = 0) -> None:
        super().__init__(num_tokens=num_tokens)
        self.extended: list[tuple[int, int]] = []

    def requests(self) -> tuple[RequestRows, ...]:
        return super().requests() if self._num_tokens else ROWS

    def extend(self, layer_idx: int, key: Any, value: Any, rows: RequestRows, mask: RaggedMask) -> Any:
        self.extended.append((layer_idx, rows.index))
        return key, value


class Layer(nn.Module):
    """Gives back what it saw, in `self.seen`."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor, *, mask: Any, cache: Any, more: Any = None) -> Any:
        self.seen.append((x, mask, cache, more))
        cache.update(x, x, 3)
        return self.compute(x)


def row(num_tokens: int) -> torch.Tensor:
    return torch.arange(2.0 * num_tokens).view(1, num_tokens, 2)


def settled(layer: Layer, **more: Callable[[int], Any]) -> None:
    """Show a layer that runs apart two rows, of 4 and of 5 tokens."""
    for count in (4, 5):
        given = {name: make(count) for name, make in more.items()}
        layer(row(count), mask=RaggedMask(3), cache=Row(count), **given)
    layer.seen.clear()


def test_each_request_is_run_by_itself_and_the_results_joined() -> None:
    layer = Layer(lambda x: (x.cumsum(1), None, {"first": x[:, :, 0]}))
    positions = torch.arange(6).view(1, 6)
    with apart(layer, {Layer}) as (running,):
        settled(layer, more=lambda count: (torch.arange(count).view(1, count), torch.ones(4)))
        running.settle()
        cache, x = Row(), row(6)
        summed, none, named = layer(x, mask=RaggedMask(3), cache=cache, more=(positions, torch.ones(4)))
    assert torch.equal(summed[:, :1], x[:, :1])
    assert torch.equal(summed[:, 1:4], x[:, 1:4].cumsum(1))
    assert summed[:, 4:].count_nonzero() == 0, "tokens that pad the row"
    assert none is None
    assert torch.equal(named["first"], torch.cat((x[:, :4, 0], torch.zeros(1, 2)), 1))
    assert cache.extended == [(3, 0), (3, 1)]
    assert [seen[2].get_seq_length() for seen in layer.seen] == [4, 0]
    assert [seen[3][0].tolist() for seen in layer.seen] == [[[0]], [[1, 2, 3]]]
    assert [seen[3][1].tolist() for seen in layer.seen] == [[1.0] * 4] * 2, "what is not for each token goes whole"
    decode, prefill = (seen[1][0, 0] for seen in layer.seen)
    assert decode.tolist() == [[True, True, True]]
    assert prefill.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert "forward" not in vars(layer)


def test_an_attention_that_runs_alone_says_so_and_no_longer_after_an_error() -> None:
    def fail(x: torch.Tensor) -> None:
        assert runs_alone()
        raise ZeroDivisionError

    layer = Layer(fail)
    with apart(layer, {Layer}), pytest.raises(ZeroDivisionError):
        layer(row(4), mask=RaggedMask(), cache=Row(4))
    assert not runs_alone()


@pytest.mark.parametrize(
    ("compute", "more", "reason"),
    [
        (lambda x: x, lambda count: torch.ones(1, count, count), r"tensor of \(1, 5, 5\) for 5 tokens"),
        (lambda x: x, lambda count: torch.ones(1, 2 * count), r"tensor of \(1, 10\) for 5 tokens"),
        (lambda x: x @ x.mT, lambda count: None, r"gives back a tensor of \(1, 5, 5\)"),
        (lambda x: x.sum(1), lambda count: None, "something that is not for each token"),
        (lambda x: x, lambda count: [None] * count, "not called alike"),
    ],
)
def test_what_cannot_be_parted_is_refused(compute: Any, more: Any, reason: str) -> None:
    layer = Layer(compute)
    with apart(layer, {Layer}) as (running,):
        settled(layer, more=more)
        with pytest.raises(UnsupportedModelError, match=f"Layer.forward.*{reason}"):
            running.settle()


@pytest.mark.parametrize("name", ["keys", "update_indexer", "is_sliding", "layers"])
def test_a_cache_of_one_request_refuses_the_rest_by_name(name: str) -> None:
    layer = Layer(lambda x: getattr(layer.seen[-1][2], name))
    with apart(layer, {Layer}), pytest.raises(UnsupportedModelError, match=f"Cache.{name}"):
        layer(row(4), mask=RaggedMask(), cache=Row(4))


def test_a_layer_without_a_mask_is_refused() -> None:
    layer = Layer(lambda x: x)
    with apart(layer, {Layer}), pytest.raises(UnsupportedModelError, match="handed 1 caches and 0 masks"):
        layer(row(4), mask=None, cache=Row(4))


def test_the_innermost_layer_that_was_handed_the_cache_is_to_blame() -> None:
    def refuse(x: torch.Tensor) -> None:
        raise UnsupportedModelError("a mask of its own")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Layer(refuse)

        def forward(self, x: torch.Tensor, **named: Any) -> Any:
            return self.attention(x, **named)

    model = nn.Module()
    model.layers = nn.ModuleList([Block()])
    with pytest.raises(UnsupportedModelError) as caught:
        model.layers[0](row(4), mask=RaggedMask(), cache=Row(4))
    assert layer_to_blame(caught.value, model) is Layer
    assert layer_to_blame(caught.value, model.layers[0]) is None, "not a layer among others"
    assert layer_to_blame(UnsupportedModelError("raised by nobody's forward"), model) is None


def test_what_freed_blocks_hold_is_never_read() -> None:
    """With NaN in every block that nobody owns, after each step, logits keep their bits."""
    runner = PlainRunner(build("doge"))
    prompts, forced = random_prompts(30, 5, 17, 9), random_prompts(20, 3, 12, 8, seed=1)

    def run(*, poison: bool) -> dict[str, torch.Tensor]:
        driven = Driven(runner, num_blocks=40, max_num_seqs=3, budget=16)
        for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
            driven.add(str(i), prompt, tokens)

        def poison_free_blocks() -> None:
            owned = {block for r in driven.requests for table in r.block_ids for block in table}
            free = [block for block in range(1, 40) if block not in owned]
            runner._kv._keys[free] = torch.nan
            runner._kv._values[free] = torch.nan

        return driven.finish(poison_free_blocks if poison else lambda: None)

    clean, poisoned = run(poison=False), run(poison=True)
    runner.close()
    for key, logits in clean.items():
        assert logits.isfinite().all()
        assert torch.equal(poisoned[key], logits), key


def test_a_runner_says_which_layers_run_apart_and_gives_them_back() -> None:
    model = build("doge")
    runner = PlainRunner(model)
    assert [layer.__name__ for layer in runner.apart] == ["DogeAttention"]
    assert runner.remarks == [
        "DogeAttention runs on one request after the other: "
        "the model computes with its attention mask (reads .dtype): a mask of its own"
    ]
    assert logits_of(runner, {"a": (random_prompts(2 * BLOCK_SIZE)[0], [1])})["a"].isfinite().all()
    runner.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not PlainRunner(build("llama")).apart


def test_fused_layers_run_apart_too_and_are_not_made_a_program() -> None:
    model = build("doge")
    analysis = analyse_model(model)
    assert analysis.plan.counts_as_fused
    runner = FusedRunner(model, analysis)
    requests = {str(i): (prompt, [3, 4, 5]) for i, prompt in enumerate(random_prompts(9, 1, 14))}
    found = logits_of(runner, requests)
    assert runner.kernels == "torch (DogeAttention runs on a part of the requests at a time)"
    runner.close()
    for key, logits in logits_of(PlainRunner(model), requests).items():
        torch.testing.assert_close(found[key], logits)


def test_the_reason_of_a_choice_says_so(tmp_path: Path) -> None:
    found = choose(build("doge"), None, ModelConfig(cache_dir=tmp_path, model_impl="plain"))
    found.runner.close()
    assert "; DogeAttention runs on one request after the other: the model computes with its" in found.reason
