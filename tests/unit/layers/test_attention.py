"""Transformers' attention interface: what is passed on, what is refused, and that everything is put back."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from tests.zoo import build
from transfuse.errors import UnsupportedModelError
from transfuse.layers.attention import ATTENTION_NAME, attending_to, paged_attention_forward, paged_attention_of
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.ragged_mask import RaggedMask

HEADS, KV_HEADS, DIM, VALUE_DIM, TOKENS = 4, 2, 6, 3, 5


class Recorder(RaggedCache):
    """A cache that keeps what it is asked and answers with numbered rows."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def attend_latent(self, layer: int, *rest: Any, **named: Any) -> NoReturn:
        raise AssertionError("nothing here is latent")

    def positions_of(self, numbers: torch.Tensor) -> NoReturn:
        raise AssertionError("nothing here counts")

    def requests(self) -> NoReturn:
        raise AssertionError("nobody runs alone here")

    def extend(self, *rest: Any) -> NoReturn:
        raise AssertionError("nobody runs alone here")

    def attend(self, layer: int, query: torch.Tensor, mask: RaggedMask, **rest: Any) -> torch.Tensor:
        self.asked = {"layer": layer, "query": query, "mask": mask, **rest}
        rows = torch.arange(query.shape[0] * query.shape[1], dtype=torch.float32)
        return rows.view(*query.shape[:2], 1).expand(-1, -1, rest["value_head_dim"])


class FooAttention(nn.Module):
    pass


@pytest.fixture
def cache() -> Recorder:
    return Recorder()


CAUSAL = RaggedMask()


def call(recorder: Recorder, *args: Any, mask: Any = CAUSAL, layer: int = 3, **kwargs: Any) -> torch.Tensor:
    key, value = recorder.update(
        torch.randn(1, KV_HEADS, TOKENS, DIM), torch.randn(1, KV_HEADS, TOKENS, VALUE_DIM), layer
    )
    query = kwargs.pop("query", torch.randn(1, HEADS, TOKENS, DIM))
    with attending_to(recorder):
        result, weights = paged_attention_forward(FooAttention(), query, key, value, mask, *args, **kwargs)
    assert weights is None
    return result


def test_the_cache_is_asked_for_what_the_layer_wants(cache: Recorder) -> None:
    query, sinks = torch.randn(1, HEADS, TOKENS, DIM), torch.randn(HEADS)
    mask = RaggedMask(7)
    result = call(cache, query=query, mask=mask, layer=2, scaling=0.3, softcap=5.0, s_aux=sinks)
    assert torch.equal(cache.asked.pop("query"), query[0].transpose(0, 1))
    assert cache.asked.pop("sinks") is sinks
    assert cache.asked == {"layer": 2, "mask": mask, "scale": 0.3, "softcap": 5.0, "value_head_dim": VALUE_DIM}
    assert result.shape == (1, TOKENS, HEADS, VALUE_DIM), "tokens before heads, as the interface has it"
    assert torch.equal(result[0, :, :, 0].flatten(), torch.arange(TOKENS * HEADS, dtype=torch.float32))


def test_what_is_not_given_is_the_usual(cache: Recorder) -> None:
    call(cache)
    assert cache.asked["scale"] == DIM**-0.5
    assert (cache.asked["softcap"], cache.asked["sinks"]) == (None, None)


@pytest.mark.parametrize("name", ["sinks", "s_aux"])
def test_sinks_go_by_two_names(name: str, cache: Recorder) -> None:
    sinks = torch.randn(HEADS)
    call(cache, **{name: sinks})
    assert cache.asked["sinks"] is sinks


def test_the_mask_decides_the_window(cache: Recorder) -> None:
    call(cache, mask=RaggedMask(None), sliding_window=4)
    assert cache.asked["mask"].window is None


def test_arguments_without_effect_pass(cache: Recorder) -> None:
    call(cache, position_ids=torch.arange(5), use_cache=True, cache=cache, is_causal=True, head_mask=None, causal=False)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"position_bias": torch.zeros(1), "alibi": 2}, "FooAttention passes alibi, position_bias to attention"),
        ({"mask": None}, "FooAttention gives attention no mask"),
        ({"mask": torch.zeros(5, 5)}, "FooAttention gives attention a mask of its own"),
        ({"dropout": 0.1}, "FooAttention asks for dropout"),
        ({"is_causal": False}, "FooAttention asks for attention that is not causal"),
        ({"query": torch.zeros(2, HEADS, TOKENS, DIM)}, r"queries have shape \(2, 4, 5, 6\)"),
        ({"query": torch.zeros(1, HEADS, TOKENS - 1, DIM)}, r"queries have shape \(1, 4, 4, 6\), keys \(1, 2, 5, 6\)"),
    ],
)
def test_what_would_change_the_result_is_refused(arguments: dict, reason: str, cache: Recorder) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        call(cache, **arguments)
    assert not cache.asked


def test_positional_extras_are_refused(cache: Recorder) -> None:
    with pytest.raises(UnsupportedModelError, match="positional arguments"):
        call(cache, 0.5)


def test_keys_that_are_not_the_caches_are_refused(cache: Recorder) -> None:
    key, value = torch.randn(1, KV_HEADS, TOKENS, DIM), torch.randn(1, KV_HEADS, TOKENS, VALUE_DIM)
    with attending_to(cache), pytest.raises(UnsupportedModelError, match="not the cache's"):
        paged_attention_forward(FooAttention(), torch.randn(1, HEADS, TOKENS, DIM), key, value, RaggedMask())


def test_caches_nest_and_forget_their_keys_even_after_an_error(cache: Recorder) -> None:
    inner = Recorder()
    key, value = inner.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    with attending_to(cache):
        with pytest.raises(RuntimeError), attending_to(inner):
            raise RuntimeError
        with pytest.raises(UnsupportedModelError):
            inner.layer_of(key, value)
        stored = cache.update(torch.zeros(1, KV_HEADS, 1, DIM), torch.zeros(1, KV_HEADS, 1, DIM), 1)
        paged_attention_forward(FooAttention(), torch.zeros(1, HEADS, 1, DIM), *stored, RaggedMask())
    assert cache.asked["layer"] == 1
    assert not inner.asked
    with pytest.raises(LookupError):
        paged_attention_forward(FooAttention(), torch.zeros(1, HEADS, 1, DIM), *stored, RaggedMask())


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_every_config_of_a_model_is_switched_and_put_back(error: type[Exception] | None) -> None:
    model = build("gemma3")  # text and vision have configs of their own
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    model.config.text_config._attn_implementation = "eager"
    before = [config._attn_implementation for config in configs]
    assert len(set(before)) == 2
    try:
        with paged_attention_of(model):
            assert {config._attn_implementation for config in configs} == {ATTENTION_NAME}
            assert AttentionInterface()[ATTENTION_NAME] is paged_attention_forward
            if error is not None:
                raise error
    except RuntimeError:
        pass
    assert [config._attn_implementation for config in configs] == before
