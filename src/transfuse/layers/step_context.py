"""Everything that attention needs to know about one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One ragged batch: the new tokens of all requests of a step as one row, without padding between them.

    T is the length of the row, of which the first `num_tokens` are real and the rest padding (see `MIN_ROWS` in
    `engine/step_inputs.py`); R requests; S rows whose logits are wanted. Requests with a single new token come first.

    Attributes:
        input_ids: i64 [T].
        positions: i64 [T], each token's place in its own request.
        num_tokens: real tokens in the row.
        cu_seqlens_q: i32 [R + 1], where each request's tokens start.
        seq_lens: i32 [R], tokens of each request with the new ones.
        block_table: per cache group, i32 [R, max_blocks].
        slot_mapping: per cache group, i64 [num_tokens], where each token's key and value go.
        state_index: each request's row of the state cache; empty where the model has none.
        logit_rows: i64 [>= S], rows of the batch that go through `lm_head`; the first S are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    num_tokens: int
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    state_index: tuple[int, ...] = ()
