from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from transfuse.engine.pooling.core import PoolingCore
from transfuse.engine.pooling.forward import Text, TextForward
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import (
    CapacityError,
    EngineError,
    NonFiniteLogitsError,
    PromptError,
    RequestError,
    WrongTaskError,
)
from transfuse.messages import ModelLimits, NewPooling, NewRequest, RequestUpdate
from transfuse.progress import ProgressCounter
from transfuse.sampling_params import SamplingParams

POISON, NAN = 90, 91


class SumForward(TextForward):
    """Gives each token its id; fails on one id, and gives NaN for another."""

    implementation = "plain"

    def __init__(self, *, pads: bool = False) -> None:
        self.pads = pads
        self.batches: list[list[int]] = []

    def run(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        self.batches.append([len(text.token_ids) for text in texts])
        if any(POISON in text.token_ids for text in texts):
            raise ValueError("poisoned")
        found = [torch.tensor(text.token_ids, dtype=torch.float32).unsqueeze(1) for text in texts]
        return [torch.where(one == NAN, torch.nan, one) for one in found]

    def show_progress(self, counter: ProgressCounter) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def _core(forward: SumForward, *, max_texts: int = 4, budget: int = 64, by_priority: bool = False) -> PoolingCore:
    return PoolingCore(
        forward,
        lambda hidden, request: hidden[request.num_skipped :].sum(0)[: request.dimensions],
        ModelLimits(max_model_len=100, vocab_size=100),
        max_texts,
        StepBudget(budget, budget),
        by_priority=by_priority,
    )


def _new(name: str, token_ids: list[int], priority: int = 0, **more: object) -> NewPooling:
    return NewPooling(request_id=name, token_ids=token_ids, priority=priority, arrival_time=0.0, **more)  # type: ignore[arg-type]


def _run(core: PoolingCore) -> dict[str, RequestUpdate]:
    ended: dict[str, RequestUpdate] = {}
    for _ in range(100):
        if not core.has_unfinished:
            return ended
        for update in core.step().updates:
            assert update.request_id not in ended
            ended[update.request_id] = update
    raise AssertionError("it does not come to an end")


def _sums(ended: dict[str, RequestUpdate]) -> dict[str, float]:
    return {name: float(np.frombuffer(update.pooled, "<f4")[0]) for name, update in ended.items()}


def test_texts_are_batched_in_order_within_both_limits() -> None:
    forward = SumForward()
    core = _core(forward, budget=64)
    for index, length in enumerate((30, 30, 30, 1, 1, 1, 1, 99)):
        core.add_text(_new(str(index), [1] * length))
    assert core.stats().num_waiting == 8
    ended = _run(core)
    assert forward.batches == [[30, 30], [30, 1, 1, 1], [1], [99]]
    assert _sums(ended)["7"] == 99.0
    assert (core.stats().num_steps, core.stats().num_step_tokens, core.stats().num_waiting) == (4, 193, 0)


def test_padded_batches_hold_texts_of_like_lengths() -> None:
    forward = SumForward(pads=True)
    core = _core(forward, budget=64)
    for index, length in enumerate((40, 4, 41, 6, 20, 5)):
        core.add_text(_new(str(index), [1] * length))
    ended = _run(core)
    assert forward.batches == [[40], [4, 6, 5], [41], [20]]
    assert _sums(ended) == {"0": 40.0, "1": 4.0, "2": 41.0, "3": 6.0, "4": 20.0, "5": 5.0}


def test_lower_priorities_are_first_where_they_count() -> None:
    for by_priority, first in ((True, "b"), (False, "a")):
        core = _core(SumForward(), max_texts=1, by_priority=by_priority)
        core.add_text(_new("a", [1], 1))
        core.add_text(_new("b", [1], 0))
        assert core.step().updates[0].request_id == first


def test_a_text_that_fails_ends_alone() -> None:
    core = _core(SumForward())
    for name, ids in (("a", [1]), ("bad", [POISON]), ("b", [2, 3]), ("nan", [NAN])):
        core.add_text(_new(name, ids))
    ended = _run(core)
    assert isinstance(ended["bad"].error, EngineError)
    assert re.search(r"ValueError: poisoned \(.*test_core\.py:\d+\)", str(ended["bad"].error))
    assert isinstance(ended["nan"].error, NonFiniteLogitsError)
    assert [ended[name].finish_reason for name in ("a", "b", "bad", "nan")] == ["stop", "stop", "error", "error"]
    assert (ended["bad"].pooled, ended["nan"].pooled) == (b"", b"")
    del ended["bad"], ended["nan"]
    assert _sums(ended) == {"a": 1.0, "b": 5.0}


def test_aborted_texts_are_gone() -> None:
    core = _core(SumForward())
    for name in "abc":
        core.add_text(_new(name, [1]))
    core.abort(["b", "unknown"])
    core.stop("unknown", "x")
    assert set(_run(core)) == {"a", "c"}
    core.add_text(_new("b", [1]))  # its name is free again
    core.abort(["b"])
    assert not core.has_unfinished
    assert core.step().updates == []


def test_what_the_text_asks_for_reaches_the_pooling() -> None:
    core = _core(SumForward())
    core.add_text(_new("a", [5, 6, 7], num_skipped=1, dimensions=1))
    assert _sums(_run(core)) == {"a": 13.0}


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (_new("x", []), PromptError),
        (_new("x", [100]), PromptError),
        (_new("x", [-1]), PromptError),
        (_new("x", [1] * 101), CapacityError),
        (_new("x", [1, 2], type_ids=[0]), RequestError),
        (_new("x", [1], type_ids=[2]), RequestError),
        (_new("x", [1], dimensions=0), RequestError),
        (_new("taken", [1]), RequestError),
    ],
)
def test_what_can_never_be_served_is_refused(new: NewPooling, error: type[Exception]) -> None:
    core = _core(SumForward())
    core.add_text(_new("taken", [1]))
    with pytest.raises(error):
        core.add_text(new)
    assert core.stats().num_waiting == 1


def test_nothing_is_generated() -> None:
    new = NewRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, arrival_time=0.0)
    with pytest.raises(WrongTaskError):
        _core(SumForward()).add(new)
