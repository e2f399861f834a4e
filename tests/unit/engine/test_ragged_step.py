"""A step in two: requests that go on by one token, and the others."""

from __future__ import annotations

import torch

from tests.unit.engine.driven import request
from transfuse.engine.batch import Batch, ScheduledRequest
from transfuse.engine.ragged_step import run_in_two
from transfuse.engine.runner import PromptLogits, StepLogits


def _entry(name: str, start: int, num_tokens: int, row: int) -> ScheduledRequest:
    scheduled = request(name, [1] * (start + num_tokens))
    scheduled.state_row = row
    return ScheduledRequest(scheduled, start, num_tokens, samples=True)


BATCH = Batch(
    (_entry("a", 5, 1, 3), _entry("b", 0, 1, 1), _entry("c", 2, 1, 0), _entry("d", 7, 2, 4), _entry("e", 0, 6, 2)),
    fresh_blocks=(8, 9),
    fresh_rows=(1, 2),
)


def _names(batch: Batch) -> list[str]:
    return [entry.request.request_id for entry in batch.entries]


def test_who_goes_on_by_one_token_comes_first_in_the_order_of_rows() -> None:
    decodes, others = BATCH.in_two()
    assert _names(decodes) == ["c", "a"] and _names(others) == ["b", "d", "e"]
    assert (decodes.fresh_blocks, decodes.fresh_rows) == ((8, 9), (1, 2)), "cleared once, before anything is written"
    assert others.fresh_blocks == others.fresh_rows == ()


def _ran(number: float, ran: list[Batch], batch: Batch) -> StepLogits:
    ran.append(batch)
    sampling = tuple(entry.request for entry in batch.entries)
    prompts = {sampling[0].request_id: PromptLogits(1, torch.full((1, 3), -number))}
    return StepLogits(torch.full((len(sampling), 3), number), sampling, prompts)


def test_both_parts_are_run_and_each_request_gets_its_logits() -> None:
    ran: list[Batch] = []
    result = run_in_two(BATCH, lambda batch: _ran(1.0, ran, batch), lambda batch: _ran(2.0, ran, batch))
    assert [_names(batch) for batch in ran] == [["c", "a"], ["b", "d", "e"]]
    assert [r.request_id for r in result.sampling] == ["c", "a", "b", "d", "e"]
    assert result.logits[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert {key: prompt.logits[0, 0].item() for key, prompt in result.prompts.items()} == {"c": -1, "b": -2}


def test_what_is_cleared_is_cleared_where_nobody_goes_on() -> None:
    ran: list[Batch] = []
    batch = Batch(BATCH.entries[3:], fresh_blocks=(8, 9))
    run_in_two(batch, lambda batch: _ran(1.0, ran, batch), lambda batch: _ran(2.0, ran, batch))
    (only,) = ran
    assert _names(only) == ["d", "e"] and only.fresh_blocks == (8, 9)
