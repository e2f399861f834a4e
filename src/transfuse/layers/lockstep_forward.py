"""A model's own forward over a ragged batch, request by request, with the products of all requests made together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from transfuse.cache.groups import LayerSpec
from transfuse.cache.kv_cache import KVCache
from transfuse.cache.state_cache import StateCache, StateSpec
from transfuse.layers.joints import find_joints
from transfuse.layers.lockstep import joined, run_in_lockstep
from transfuse.layers.own_cache import OwnCacheForm, Snapshot, new_cache
from transfuse.layers.own_forward import OwnForward, is_close
from transfuse.layers.step_context import StepContext

# Rows that show what counts tokens: unlike each other, and any size of a model that is a power of two.
_SHORT, _LONG = 7, 11


@dataclass(frozen=True, slots=True)
class _Request:
    """One request's part of a step."""

    index: int
    start: int
    stop: int
    past: int
    rows: list[int]

    @property
    def num_new(self) -> int:
        return self.stop - self.start


class LockstepForward:
    """Runs each request through the model's own forward, over the cache that Transformers makes for it.

    What that cache keeps for a token lies in pages between steps, and what it keeps of a text, however long, in rows of
    the state cache. So it is right for whatever a model computes from lengths, positions or masks; all that is assumed
    is that what a cache keeps is one of the two.

    Args:
        model: in eval mode. Until `close`, modules that treat tokens alike are called for all requests at once.

    Attributes:
        specs: what is kept for each token, by cache layer.
        state_specs: what is kept of each text.
        joints: modules that are called for all requests at once.

    Raises:
        UnsupportedModelError: the model's cache keeps something else, or its forward cannot be called so.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._forward = OwnForward(model)
        self._makes_own_cache = False
        self._continues_texts = True
        self._form = self._found_form()
        self.state_specs: list[StateSpec] = list(self._form.states)
        self.specs: list[LayerSpec] = [tensor.spec for tensor in self._form.tensors]
        with ExitStack() as restore, torch.inference_mode():
            self.joints = find_joints(model, self._probe, _SHORT, _LONG)
            restore.enter_context(joined(self.joints))
            self._restore = restore.pop_all()

    def close(self) -> None:
        """Give the model's modules their own forwards back."""
        self._restore.close()

    @torch.inference_mode()
    def probe(self) -> None:
        """Run the model on a small row of one request."""
        self._probe(_SHORT)

    @torch.inference_mode()
    def _found_form(self) -> OwnCacheForm:
        try:
            short = self._probe(_SHORT)
        except Exception as error:
            # A model may take a cache of a class of its own only, which it makes where it is given none.
            self._makes_own_cache = True
            try:
                short = self._probe(_SHORT)
            except Exception:
                # It was not for want of that.
                raise error from None
        (whole, long), single = self._call(None, torch.arange(_LONG), 0, list(range(_LONG))), self._probe(1)
        snapshots = [Snapshot.of(cache, count) for cache, count in ((short, _SHORT), (long, _LONG), (single, 1))]
        one, other, least = snapshots
        form = OwnCacheForm.of(one, other, self._model.dtype, least)
        # The same in two steps.
        logits, _ = self._call(short, torch.arange(_SHORT, _LONG), _SHORT, list(range(_LONG - _SHORT)))
        self._continues_texts = not form.states or is_close(logits, whole[_SHORT:])
        form.tensors_of(short, _LONG)
        form.states_of(short)
        OwnCacheForm.of(one, Snapshot.of(short, _LONG), self._model.dtype, least)
        return form

    def _probe(self, num_tokens: int) -> Any:
        return self._call(None, torch.arange(num_tokens), 0, list(range(num_tokens)))[1]

    def _call(self, cache: Any, input_ids: torch.Tensor, past: int, rows: list[int]) -> tuple[torch.Tensor, Any]:
        """Logits [rows, V] of one request's new tokens, and the cache, which has taken them; None for an empty one."""
        if cache is None and not self._makes_own_cache:
            cache = new_cache(self._model)
        return self._forward(cache, input_ids, past, rows)

    def logits(self, kv_cache: KVCache, states: StateCache | None, context: StepContext) -> torch.Tensor:
        """Logits [rows, V] of `context.logit_rows`; pages and states are written."""
        requests = _requests(context)
        found: dict[int, torch.Tensor] = {}
        for together in _waves(requests, kv_cache, context):
            parts = run_in_lockstep([partial(self._run, request, kv_cache, states, context) for request in together])
            for request, part in zip(together, parts, strict=True):
                found |= {request.start + row: logits for row, logits in zip(request.rows, part, strict=True)}
        return torch.stack([found[row] for row in context.logit_rows.tolist()])

    def _run(
        self, request: _Request, kv_cache: KVCache, states: StateCache | None, context: StepContext
    ) -> torch.Tensor:
        pages, form = _Pages(kv_cache, context, request), self._form
        rows = [] if states is None else states.rows(context.state_index[request.index])
        cache = None
        if request.past:
            tokens = [kept.of_rows(pages.read(i)) for i, kept in enumerate(form.tensors)]
            cache = form.filled(request.past, tokens, rows)
        input_ids = context.input_ids[request.start : request.stop]
        if cache is None or self._continues_texts:
            logits, cache = self._call(cache, input_ids, request.past, request.rows)
        else:
            singly = [
                self._call(cache, one, request.past + i, [0])[0] for i, one in enumerate(torch.split(input_ids, 1))
            ]
            logits = torch.cat(singly)[request.rows]
        total = request.past + request.num_new
        for index, (kept, tensor) in enumerate(zip(form.tensors, form.tensors_of(cache, total), strict=True)):
            pages.write(index, kept.rows_of(tensor, request.past))
        for row, state in zip(rows, form.states_of(cache), strict=True):
            if state.data_ptr() != row.data_ptr():
                row.copy_(state)
        return logits


@dataclass(frozen=True, slots=True)
class _Pages:
    """One request's part of the pages."""

    kv_cache: KVCache
    context: StepContext
    request: _Request

    def read(self, layer: int) -> torch.Tensor:
        """What the request's earlier tokens take in a cache layer, [past, numbers]."""
        pages = self.kv_cache.keys[layer]
        table = self.context.block_table[self.kv_cache.group_of_layer[layer]][self.request.index]
        num_blocks = -(-self.request.past // pages.shape[2])
        return pages[table[:num_blocks].long(), 0].flatten(0, 1)[: self.request.past]

    def write(self, layer: int, rows: torch.Tensor) -> None:
        """Keep what its new tokens take, [new, numbers]."""
        pages = self.kv_cache.keys[layer]
        slots = self.context.slot_mapping[self.kv_cache.group_of_layer[layer]][self.request.start : self.request.stop]
        pages[slots // pages.shape[2], 0, slots % pages.shape[2]] = rows


def _requests(context: StepContext) -> list[_Request]:
    starts, lengths = context.cu_seqlens_q.tolist(), context.seq_lens.tolist()
    wanted = sorted(set(context.logit_rows.tolist()))
    found = []
    for index, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        # Of a prompt's earlier chunks nobody wants any; one is computed all the same.
        rows = [row - start for row in wanted if start <= row < stop] or [stop - start - 1]
        found.append(_Request(index, start, stop, length - (stop - start), rows))
    return found


def _waves(requests: Sequence[_Request], kv_cache: KVCache, context: StepContext) -> list[list[_Request]]:
    """Requests in the order in which they can run: one that shares blocks that another fills in this step is later."""
    if not context.block_table or all(request.past == 0 for request in requests):
        return [list(requests)]
    block_size = kv_cache.keys[0].shape[2]
    table, slots = context.block_table[0], context.slot_mapping[0]
    writers = {block: r.index for r in requests for block in (slots[r.start : r.stop] // block_size).tolist()}
    awaited: dict[int, set[int]] = {}
    for r in requests:
        blocks = table[r.index, : -(-r.past // block_size)].tolist()
        awaited[r.index] = {writers[block] for block in blocks if block in writers} - {r.index}
    waves: list[list[_Request]] = []
    left = {r.index: r for r in requests}
    while left:
        waves.append([r for r in left.values() if left.keys().isdisjoint(awaited[r.index])])
        for r in waves[-1]:
            del left[r.index]
    return waves
