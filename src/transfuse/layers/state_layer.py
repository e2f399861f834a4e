"""Runs a layer that keeps a state on a row's requests: all that continue by one token at once, the others apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from transfuse.cache.state_cache import StateCache, StateSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.ragged_cache import RaggedCache, RequestRows
from transfuse.layers.replaced_forwards import forwards_replaced
from transfuse.layers.request_states import RequestStates
from transfuse.layers.token_dims import TokenDims


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Requests of a row that a layer runs on at once.

    Attributes:
        states: theirs.
        start: the first of their tokens in the row, where those lie side by side.
        num_tokens: of each request.
        others: where each request's only token lies, i64; None where they lie side by side, or there is one request.
        num_requests: how many.
        continues: whether they have run before.
    """

    states: RequestStates
    start: int
    num_tokens: int
    num_requests: int
    others: torch.Tensor | None
    continues: bool

    def part(self, leaf: Any, dim: int | None) -> Any:
        """What the layer is handed of a row's tensor whose dimension `dim` counts tokens."""
        if dim is None:
            return leaf
        if self.num_requests == 1:
            return leaf.narrow(dim, self.start, self.num_tokens)
        if leaf.shape[0] != 1 or dim == 0:
            raise UnsupportedModelError(f"a tensor of {tuple(leaf.shape)} cannot be parted by requests")
        tokens = leaf.transpose(0, dim)
        if self.others is None:
            return tokens.narrow(0, self.start, self.num_requests)
        return tokens.index_select(0, self.others)

    def place(self, part: torch.Tensor, row: torch.Tensor, dim: int) -> None:
        """Write what the layer gave back to a row's tensor."""
        if self.num_requests > 1:
            part = part.transpose(0, dim)
        if self.others is None:
            row.narrow(dim, self.start, part.shape[dim]).copy_(part)
        else:
            row.index_copy_(dim, self.others, part)

    def is_row_of(self, num_tokens: int) -> bool:
        """Whether it is a whole row of so many tokens, one of each request, in their order."""
        return self.num_tokens == 1 and self.num_requests == num_tokens and self.others is None

    def tokens(self) -> list[StateGroup]:
        """The same, one token at a time."""
        return [
            StateGroup(self.states, self.start + token, 1, 1, None, self.continues) for token in range(self.num_tokens)
        ]


def state_groups(cache: StateCache, requests: Sequence[RequestRows], rows: Sequence[int]) -> list[StateGroup]:
    """A row's requests: all that continue by one token, and each of the others.

    Args:
        cache: states of all running requests.
        requests: of the row.
        rows: each request's, of `cache`.
    """
    # In the order of their rows, which then mostly lie side by side.
    decodes = sorted((r for r in requests if r.past > 0 and r.num_new == 1), key=lambda r: rows[r.index])
    groups = []
    if decodes:
        states = RequestStates(cache, [rows[r.index] for r in decodes], continues=True)
        first, starts = decodes[0].start, [r.start for r in decodes]
        is_in_order = starts == list(range(first, first + len(starts)))
        others = None if is_in_order else torch.tensor(starts)
        groups.append(StateGroup(states, first, 1, len(decodes), others, continues=True))
    for r in requests:
        if r.past == 0 or r.num_new > 1:
            states = RequestStates(cache, [rows[r.index]], continues=r.past > 0)
            groups.append(StateGroup(states, r.start, r.num_new, 1, None, continues=r.past > 0))
    return groups


def decode_group(cache: StateCache) -> StateGroup:
    """A row's requests where all continue by one token, and `cache` has their rows, and no others, in their order."""
    states = RequestStates(cache, range(cache.num_rows), continues=True)
    return StateGroup(states, 0, 1, cache.num_rows, None, continues=True)


class StateLayer:
    """The forward of a module that reads and writes states, called for the requests of a row.

    Args:
        module: the layer.

    Attributes:
        continues_texts: whether it goes on from a state with several tokens at once. Some code reads its state for a
            single token only, and would begin anew; it is given one token after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self.continues_texts = True
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._dims = TokenDims(self.name)
        self._last: tuple[list[Any], pytree.TreeSpec] | None = None
        self._is_tried = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward with what belongs to a group of requests, for each, and join the results."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        cache = next((leaf for leaf in leaves if isinstance(leaf, RaggedCache)), None)
        if cache is None or self._is_tried:
            # In a layer that runs on one request already.
            return self._forward(*args, **kwargs)
        if not self._dims.is_settled:
            # The row is one request, and the probe answers for its states.
            result = self._forward(*args, **kwargs)
            (row,) = cache.requests()
            self._dims.see(row.stop, leaves, pytree.tree_leaves(result))
            self._last = leaves, spec
            return result
        if len(leaves) != len(self._dims.given):
            raise UnsupportedModelError(f"{self.name}.forward is not called as in the first forward")
        parts: list[tuple[StateGroup, Any]] = []
        for group in cache.state_groups():
            for part in group.tokens() if self._needs_single_tokens(group) else (group,):
                parts.append((part, self._run(self._forward, part, leaves, spec)))
            group.states.store()
        return self._joined(parts, self._dims.num_tokens(leaves), cache)

    def _needs_single_tokens(self, group: StateGroup) -> bool:
        return group.continues and group.num_tokens > 1 and not self.continues_texts

    def _run(self, forward: Callable[..., Any], group: StateGroup, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        given = [
            group.states if isinstance(leaf, RaggedCache) else group.part(leaf, dim)
            for leaf, dim in zip(leaves, self._dims.given, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return forward(*args, **kwargs)

    def _joined(self, parts: Sequence[tuple[StateGroup, Any]], num_tokens: int, cache: RaggedCache) -> Any:
        results = [pytree.tree_flatten(result) for _, result in parts]
        only = parts[0][0] if len(parts) == 1 and parts[0][0].is_row_of(num_tokens) else None
        joined: list[Any] = []
        for column, dim in enumerate(self._dims.result):
            first = results[0][0][column]
            if dim is None:
                joined.append(cache if isinstance(first, RequestStates) else first)
                continue
            if only is not None:
                joined.append(first.transpose(0, dim))
                continue
            shape = list(first.shape)
            shape[0] = 1
            shape[dim] = num_tokens
            # Zero for tokens that pad the row.
            row = first.new_zeros(shape)
            for (group, _), (leaves, _) in zip(parts, results, strict=True):
                group.place(leaves[column], row, dim)
            joined.append(row)
        return pytree.tree_unflatten(joined, results[0][1])

    def settle(self, specs: Sequence[StateSpec]) -> None:
        """Fix how the layer is run, from the forwards so far.

        Args:
            specs: states of the model.

        Raises:
            UnsupportedModelError: what it is handed or gives back cannot be parted by requests.
        """
        self._dims.settle()
        if self._last is not None:
            self.continues_texts = self._reads_all_states(specs)

    @torch.inference_mode()
    def _reads_all_states(self, specs: Sequence[StateSpec]) -> bool:
        """Whether each of its states makes a difference to several tokens that continue a text, to the last bit."""
        assert self._last is not None
        leaves, spec = self._last
        # Tokens of the probe may be padding, for which a layer gives zero whatever its state.
        noise = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(leaf.shape, generator=noise).to(leaf) if dim is not None and leaf.is_floating_point() else leaf
            for leaf, dim in zip(leaves, self._dims.given, strict=True)
        ]
        cache = StateCache(specs, 1)
        cache.zero_rows([0])
        begun = RequestStates(cache, [0], continues=False)
        num_tokens = self._dims.num_tokens(leaves)
        self._is_tried = True
        try:
            self._run(self._module, StateGroup(begun, 0, 2, 1, None, False), leaves, spec)
            kept = {key: tensor.clone() for key, tensor in cache.tensors.items()}

            def go_on(changed: StateSpec | None) -> list[torch.Tensor]:
                for key, tensor in cache.tensors.items():
                    tensor.copy_(kept[key] + 1 if key == changed else kept[key])
                states = RequestStates(cache, [0], continues=True)
                result = self._run(self._module, StateGroup(states, 2, num_tokens - 2, 1, None, True), leaves, spec)
                return [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

            expected = go_on(None)
            own = [key for key, tensor in cache.tensors.items() if key.layer in begun.layers]
            return all(any(not torch.equal(a, b) for a, b in zip(go_on(key), expected, strict=True)) for key in own)
        finally:
            self._is_tried = False


@contextmanager
def keeping_states(modules: Collection[nn.Module]) -> Iterator[list[StateLayer]]:
    """Within it, these modules run on the requests of a row, each with its states."""
    layers = {module: StateLayer(module) for module in modules}
    with forwards_replaced(layers):
        yield list(layers.values())
