"""Runs the untouched forward of a model on ragged batches, with attention over the paged cache."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from transfuse.cache.groups import group_layers
from transfuse.cache.kv_cache import KVCache, block_bytes
from transfuse.engine.runner import ModelRunner, PromptLogits, StepLogits
from transfuse.engine.scheduler import Batch
from transfuse.engine.step_inputs import MIN_ROWS, build_step_inputs
from transfuse.layers.attention import attending_to, paged_attention_of
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.step_context import StepContext


class PlainRunner(ModelRunner):
    """See `ModelRunner`.

    Args:
        model: in eval mode. Until `close`, its attention goes to the paged cache.

    Raises:
        UnsupportedModelError: the model's code does something that a ragged batch cannot answer; the message names it.
    """

    implementation = "plain"
    max_num_seqs = None
    supports_chunks = True

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._arguments = ForwardArguments.of(type(model))
        self._kv: KVCache | None = None
        self._block_size = 0
        with ExitStack() as restore:
            restore.enter_context(paged_attention_of(model))
            probe = self._probe_layers()
            self._specs, self._layout = probe.specs(), probe.layout()
            # Kept open until close(); an error above has already undone it.
            self._restore = restore.pop_all()
        self.groups = group_layers(self._specs)

    def _probe_layers(self) -> LayerProbe:
        zeros = torch.zeros(MIN_ROWS, dtype=torch.int64)
        row = torch.tensor([0, MIN_ROWS], dtype=torch.int32)
        probe = LayerProbe()
        context = StepContext(
            input_ids=zeros,
            positions=torch.arange(MIN_ROWS),
            num_tokens=MIN_ROWS,
            cu_seqlens_q=row,
            seq_lens=row[1:],
            block_table=(),
            slot_mapping=(),
            logit_rows=zeros,
        )
        self._forward(probe, context)
        return probe

    def bytes_per_block(self, block_size: int) -> int:
        """See `ModelRunner.bytes_per_block`."""
        return block_bytes(self._specs, self.groups, block_size, self._model.dtype)

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """See `ModelRunner.allocate`."""
        self._block_size = block_size
        self._kv = KVCache(
            self._specs, self.groups, num_blocks=num_blocks, block_size=block_size, dtype=self._model.dtype
        )
        return self._kv.num_bytes

    def run(self, batch: Batch) -> StepLogits:
        """See `ModelRunner.run`."""
        assert self._kv is not None, "allocate() comes first"
        self._kv.zero_blocks(batch.fresh_blocks)
        inputs = build_step_inputs(batch, len(self.groups), self._block_size)
        logits = self._forward(PagedCache(self._kv, inputs.context, self._layout), inputs.context)
        return StepLogits(
            logits[: len(inputs.sampling)],
            inputs.sampling,
            {p.request.request_id: PromptLogits(p.first_target, logits[p.start : p.stop]) for p in inputs.prompts},
        )

    @torch.inference_mode()
    def _forward(self, cache: RaggedCache, context: StepContext) -> torch.Tensor:
        """Logits [rows, V] of `context.logit_rows`."""
        arguments = self._arguments
        input_ids = context.input_ids.unsqueeze(0)
        more = {"logits_to_keep": context.logit_rows} if arguments.takes_logit_rows else {}
        if arguments.takes_mask:
            more["attention_mask"] = torch.ones_like(input_ids)
        with attending_to(cache):
            output = self._model(
                input_ids=input_ids,
                position_ids=context.positions.unsqueeze(0),
                use_cache=True,
                **{arguments.cache: cache},
                **more,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if arguments.takes_logit_rows else logits[context.logit_rows]

    def release(self, request_id: str) -> None:
        """Nothing: a request keeps only blocks."""

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self._restore.close()
