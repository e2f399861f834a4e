"""Runs the untouched forward of a model on ragged batches, with attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedModel

from transfuse.cache.groups import LayerSpec, group_layers
from transfuse.cache.kv_cache import KVCache, block_bytes
from transfuse.cache.state_cache import StateCache, StateSpec, row_bytes
from transfuse.engine.ragged_step import run_ragged
from transfuse.engine.runner import ModelRunner, StepLogits
from transfuse.engine.scheduler import Batch
from transfuse.engine.step_inputs import MIN_ROWS
from transfuse.engine.verdicts import where
from transfuse.errors import UnsupportedModelError
from transfuse.layers.apart import ApartLayer, apart, layer_to_blame
from transfuse.layers.attention import attending_to, paged_attention_of
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.forward_arguments import ForwardArguments
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.lockstep_forward import LockstepForward
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.state_layer import StateLayer, keeping_states
from transfuse.layers.step_context import StepContext


class PlainRunner(ModelRunner):
    """See `ModelRunner`.

    Args:
        model: in eval mode. Until `close`, its attention goes to the paged cache.
        whole_texts: whether it is right for whole prompts only: then none is cut, and no prefix is shared.

    Attributes:
        specs: what each cache layer keeps.
        state_specs: what is kept of each running request beside.
        row_refusal: why requests run side by side and not as one row; empty where they do not.

    Raises:
        UnsupportedModelError: the model's code does something that a ragged batch cannot answer; the message names it.
    """

    implementation = "plain"
    max_num_seqs = None

    def __init__(self, model: PreTrainedModel, *, whole_texts: bool = False) -> None:
        self._model = model
        self.supports_chunks = not whole_texts
        self._kv: KVCache | None = None
        self._block_size = 0
        self.state_specs: list[StateSpec] = []
        self._states: StateCache | None = None
        self._state_layers: list[StateLayer] = []
        # Layers that run on one request after the other, and why.
        self.apart: dict[type[nn.Module], str] = {}
        self.lockstep: LockstepForward | None = None
        self.row_refusal = ""
        try:
            self._start_ragged()
        except UnsupportedModelError as error:
            self._start_lockstep(error)
        except Exception as error:
            # What stands for the cache may not be what the model's code takes it for.
            try:
                self._start_lockstep(UnsupportedModelError(f"its forward over a ragged row fails: {where(error)}"))
            except UnsupportedModelError:
                raise error from None
        self.groups = group_layers(self.specs)
        self.bytes_per_state = row_bytes(self.state_specs)

    def _start_ragged(self) -> None:
        self._arguments = ForwardArguments.of(type(self._model))
        with ExitStack() as restore:
            restore.enter_context(paged_attention_of(self._model))
            self.specs, self.state_specs, self._layout = self._probed(restore)
            # Kept open until close(); an error above has already undone it.
            self._restore = restore.pop_all()

    def _start_lockstep(self, refusal: UnsupportedModelError) -> None:
        """Have each request run through the model's own forward, which a row of several has ruled out."""
        self.apart, self._state_layers, self.row_refusal = {}, [], str(refusal)
        with ExitStack() as restore:
            try:
                self.lockstep = LockstepForward(self._model)
                restore.callback(self.lockstep.close)
                self._before_probe()
                self.lockstep.probe()
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{refusal}; and request by request: {error}") from None
            except Exception as error:
                raise UnsupportedModelError(
                    f"{refusal}; and request by request its forward fails: {where(error)}"
                ) from error
            self.specs, self.state_specs = self.lockstep.specs, self.lockstep.state_specs
            self._restore = restore.pop_all()

    def _probed(self, restore: ExitStack) -> tuple[list[LayerSpec], list[StateSpec], CacheLayout]:
        """What each cache layer keeps, and of which tensors.

        Layers whose code does what a ragged batch cannot answer are taken to need a request to themselves.
        """
        refusal: UnsupportedModelError | None = None
        while True:
            self._before_probe()
            with ExitStack() as tried:
                layers = tried.enter_context(apart(self._model, self.apart))
                try:
                    found = self._probe_with(layers, tried)
                except UnsupportedModelError as error:
                    refusal = refusal or error
                    blamed = layer_to_blame(error, self._model)
                    if blamed is None or blamed in self.apart:
                        raise refusal from None
                    self.apart[blamed] = str(error)
                else:
                    restore.push(tried.pop_all())
                    return found

    @property
    def runs_on_rows(self) -> bool:
        """See `ModelRunner.runs_on_rows`."""
        return self.lockstep is None

    @property
    def remarks(self) -> list[str]:
        """What to say of how the model is run: what does not run on the whole row, and why."""
        if self.lockstep is not None:
            found = [f"requests run side by side, each in a forward of its own, since {self.row_refusal}"]
            if self.state_specs:
                found.append("prefixes are not shared, since a state is kept of each text")
            return found
        found = [f"{layer.__name__} runs on one request after the other: {why}" for layer, why in self.apart.items()]
        if self._state_layers:
            names = ", ".join(dict.fromkeys(layer.name for layer in self._state_layers))
            found.append(f"{names} keeps a state of each request, so that prefixes are not shared")
        singly = dict.fromkeys(layer.name for layer in self._state_layers if not layer.continues_texts)
        if singly:
            found.append(f"{', '.join(singly)} continues texts token by token, since its code begins anew with several")
        return found

    def _before_probe(self) -> None:
        """Called before each try to run the model on a ragged row."""

    def _probe_with(
        self, layers: Sequence[ApartLayer], restore: ExitStack
    ) -> tuple[list[LayerSpec], list[StateSpec], CacheLayout]:
        empty = self._probe_layers()
        specs, states, layout = empty.specs(), empty.state_specs(), empty.layout()
        self._state_layers = restore.enter_context(keeping_states(empty.state_layers))
        others = []
        if self._state_layers:
            others.append(self._probe_layers())
        if layout.num_listed is not None:
            others.append(self._probe_layers(layout))
        if layers or self._state_layers:
            others.append(self._probe_layers(layout if layout.num_listed is not None else None, MIN_ROWS + 1))
            for layer in layers:
                layer.settle()
            for state_layer in self._state_layers:
                state_layer.settle(states)
        if any((other.specs(), other.state_specs(), other.layout()) != (specs, states, layout) for other in others):
            raise UnsupportedModelError("cache layers are written otherwise once Cache.layers are initialised")
        return specs, states, layout

    def _probe_layers(self, filled: CacheLayout | None = None, num_tokens: int = MIN_ROWS) -> LayerProbe:
        probe = LayerProbe(self._model.config, filled, num_tokens)
        zeros = torch.zeros(num_tokens, dtype=torch.int64)
        row = torch.tensor([0, num_tokens], dtype=torch.int32)
        context = StepContext(
            input_ids=zeros,
            positions=torch.arange(num_tokens),
            num_tokens=num_tokens,
            cu_seqlens_q=row,
            seq_lens=row[1:],
            block_table=(),
            slot_mapping=(),
            logit_rows=zeros,
        )
        with torch.inference_mode():
            self._forward(probe, context)
        return probe

    def bytes_per_block(self, block_size: int) -> int:
        """See `ModelRunner.bytes_per_block`."""
        return block_bytes(self.specs, self.groups, block_size, self._model.dtype)

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """See `ModelRunner.allocate`."""
        self._block_size = block_size
        self._kv = KVCache(
            self.specs, self.groups, num_blocks=num_blocks, block_size=block_size, dtype=self._model.dtype
        )
        return self._kv.num_bytes

    def allocate_states(self, num_rows: int) -> int:
        """See `ModelRunner.allocate_states`."""
        if not self.state_specs:
            return 0
        self._states = StateCache(self.state_specs, num_rows)
        return self._states.num_bytes

    def run(self, batch: Batch) -> StepLogits:
        """See `ModelRunner.run`."""
        assert self._kv is not None, "allocate() comes first"
        if self._states is not None:
            self._states.zero_rows(batch.fresh_rows)
        return self._run(batch)

    def _run(self, batch: Batch) -> StepLogits:
        """As `run`, after states that were handed out have been cleared."""
        return self._run_by(batch, self._logits, MIN_ROWS)

    def _run_by(self, batch: Batch, logits_of: Callable[[StepContext], torch.Tensor], min_rows: int) -> StepLogits:
        """Compute the batch's tokens with one call of `logits_of`, for a row of `min_rows` tokens or more."""
        assert self._kv is not None
        return run_ragged(
            batch,
            self._kv,
            num_groups=len(self.groups),
            block_size=self._block_size,
            min_rows=min_rows,
            logits_of=logits_of,
        )

    @torch.inference_mode()
    def _logits(self, context: StepContext) -> torch.Tensor:
        """Logits [rows, V] of `context.logit_rows`; the cache is written."""
        assert self._kv is not None, "allocate() comes first"
        if self.lockstep is not None:
            return self.lockstep.logits(self._kv, self._states, context)
        return self._forward(PagedCache(self._kv, context, self._layout, self._states), context)

    def _forward(self, cache: RaggedCache, context: StepContext) -> torch.Tensor:
        """Logits [rows, V] of `context.logit_rows`."""
        arguments = self._arguments
        input_ids = context.input_ids.unsqueeze(0)
        more = {"logits_to_keep": context.logit_rows} if arguments.takes_logit_rows else {}
        if arguments.takes_mask:
            more["attention_mask"] = torch.ones_like(input_ids)
        if arguments.takes_positions:
            more["position_ids"] = context.positions.unsqueeze(0)
        with attending_to(cache):
            output = self._model(
                input_ids=input_ids,
                use_cache=True,
                **{arguments.cache: cache},
                **more,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if arguments.takes_logit_rows else logits[context.logit_rows]

    def release(self, request_id: str) -> None:
        """Nothing: what a request keeps, blocks and a row of states, is the scheduler's."""

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self._restore.close()
