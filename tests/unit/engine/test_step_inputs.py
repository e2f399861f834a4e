"""The tensors of a step against a reference that goes token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.driven import request
from transfuse.engine.batch import Batch, ScheduledRequest
from transfuse.engine.step_inputs import MIN_ROWS, build_step_inputs


@dataclass
class Entry:
    """A drawn request: tokens, where the step starts, how many it computes."""

    num_prompt: int
    num_output: int
    start: int
    num_tokens: int
    samples: bool
    wants_prompt: bool


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    num_prompt, num_output = draw(st.integers(1, 12)), draw(st.integers(0, 6))
    total = num_prompt + num_output
    start = draw(st.integers(0, total - 1))
    num_tokens = draw(st.integers(1, total - start))
    return Entry(num_prompt, num_output, start, num_tokens, draw(st.booleans()), draw(st.booleans()))


def _scheduled(index: int, entry: Entry, num_groups: int, block_size: int, nulls: list[int]) -> ScheduledRequest:
    prompt = [100 * index + i for i in range(entry.num_prompt)]
    r = request(str(index), prompt, 50, prompt_logprobs=0 if entry.wants_prompt else None)
    r.output_token_ids = [100 * index + 50 + i for i in range(entry.num_output)]
    num_blocks = -(-(entry.start + entry.num_tokens) // block_size)
    # Blocks that a sliding window has passed are null; those that the step writes are not.
    passed = [min(null, entry.start // block_size) for null in nulls]
    r.block_ids = [
        [0] * passed[g] + [1 + 1000 * g + 50 * index + b for b in range(passed[g], num_blocks)]
        for g in range(num_groups)
    ]
    return ScheduledRequest(r, entry.start, entry.num_tokens, entry.samples)


@settings(max_examples=150, deadline=None)
@given(
    drawn=st.lists(entries(), min_size=1, max_size=6),
    num_groups=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    nulls=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_tensors_equal_the_reference(drawn: list[Entry], num_groups: int, block_size: int, nulls: list[int]) -> None:
    drawn.sort(key=lambda entry: entry.num_tokens > 1)
    scheduled = [_scheduled(i, entry, num_groups, block_size, nulls) for i, entry in enumerate(drawn)]
    inputs = build_step_inputs(Batch(tuple(scheduled)), num_groups, block_size)
    context = inputs.context

    ids, positions, lens, starts, sampled_rows = [], [], [], [0], []
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    for s in scheduled:
        for position in range(s.start, s.start + s.num_tokens):
            ids.append(s.request.token_at(position))
            positions.append(position)
            for group in range(num_groups):
                block = s.request.block_ids[group][position // block_size]
                slots[group].append(block * block_size + position % block_size)
        starts.append(len(ids))
        lens.append(s.start + s.num_tokens)
        if s.samples:
            sampled_rows.append(len(ids) - 1)

    padding = max(0, MIN_ROWS - len(ids))
    assert context.num_tokens == len(ids)
    assert context.input_ids.tolist() == ids + [0] * padding
    assert context.positions.tolist() == positions + [0] * padding
    assert context.cu_seqlens_q.tolist() == starts
    assert context.seq_lens.tolist() == lens
    assert [s.tolist() for s in context.slot_mapping] == slots, "and padding is written nowhere"
    for group, table in enumerate(context.block_table):
        for row, s in zip(table.tolist(), scheduled, strict=True):
            blocks = s.request.block_ids[group]
            assert row == blocks + [0] * (len(row) - len(blocks))

    assert [r.request_id for r in inputs.sampling] == [s.request.request_id for s in scheduled if s.samples]
    rows = context.logit_rows.tolist()
    assert len(rows) >= MIN_ROWS
    assert rows[: len(sampled_rows)] == sampled_rows
    assert max(rows) < context.input_ids.shape[0]
    found = {p.request.request_id: (p.first_target, rows[p.start : p.stop]) for p in inputs.prompts}
    expected = {}
    for s, first in zip(scheduled, starts, strict=False):
        # Row i of the request predicts token i + 1; wanted are those of the prompt.
        targets = [p + 1 for p in range(s.start, s.start + s.num_tokens) if p + 1 < s.request.num_prompt_tokens]
        if s.request.params.prompt_logprobs is not None and targets:
            expected[s.request.request_id] = (targets[0], [first + t - 1 - s.start for t in targets])
    assert found == expected


def test_types_are_those_of_the_contract() -> None:
    entry = _scheduled(0, Entry(5, 0, 0, 5, True, True), 2, 4, [0, 0])
    context = build_step_inputs(Batch((entry,)), 2, 4).context
    i64 = (context.input_ids, context.positions, context.logit_rows, *context.slot_mapping)
    assert {t.dtype for t in i64} == {torch.int64}
    assert {t.dtype for t in (context.cu_seqlens_q, context.seq_lens, *context.block_table)} == {torch.int32}
