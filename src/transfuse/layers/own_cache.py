"""The cache that Transformers makes for one request, put together from pages and taken apart into them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from transfuse.cache.groups import LayerSpec
from transfuse.cache.state_cache import StateSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.token_dims import shapes_of, token_dim

# What such a layer is made of, by the name of the attribute.
_State = dict[str, Any]
# In the place of a name, where a cache is a list or another plain container.
_ITSELF = "itself"


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache as `generate` makes it, in which sliding layers keep every token: masks say what is seen."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def _without_window(layer: Any) -> Any:
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return layer


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor of a cache layer that has an entry for each token.

    Attributes:
        layer: its index in `Cache.layers`.
        name: of the attribute.
        dim: that counts tokens.
        shape: of what one token takes: all other dimensions.
        dtype: of its numbers.
        page_dtype: of the numbers in pages, which hold others bit by bit.
    """

    layer: int
    name: str
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    page_dtype: torch.dtype

    @property
    def spec(self) -> LayerSpec:
        """What it takes in pages: a row of numbers for each token."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return LayerSpec("full", None, 1, -(-num_bytes // self.page_dtype.itemsize), 0)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor of the tokens whose numbers are the rows of [tokens, numbers]."""
        return rows.contiguous().view(self.dtype).view(len(rows), *self.shape).movedim(0, self.dim)

    def rows_of(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """The numbers [tokens, numbers] of the tokens from `start` on."""
        tokens = tensor.movedim(self.dim, 0)[start:]
        return tokens.reshape(len(tokens), -1).contiguous().view(self.page_dtype)


@dataclass(frozen=True)
class OwnCacheForm:
    """What the cache of a model is made of: that which Transformers makes for it, or one of a class of its own.

    Attributes:
        tensors: with an entry for each token, in the order of cache layers.
        states: tensors of fixed size, in the same order. `StateSpec.kind` is the attribute, `StateSpec.index` counts
            the leaves of its value.
        others: per layer of the cache, its class and everything else that it has once there are tokens in it; last the
            same of the cache itself.
        counts: attributes that count tokens, with the index of their layer.
    """

    tensors: tuple[KeptTensor, ...]
    states: tuple[StateSpec, ...]
    others: tuple[tuple[type, _State], ...]
    counts: frozenset[tuple[int, str]]

    @classmethod
    def of(
        cls, short: Snapshot, long: Snapshot, page_dtype: torch.dtype, single: Snapshot | None = None
    ) -> OwnCacheForm:
        """Find it by comparing two caches that hold unlike numbers of tokens.

        Args:
            short: one of them.
            long: the one with more.
            page_dtype: of the numbers in pages.
            single: one that holds a single token. What is as large in it as in the others is a state; without it,
                nothing is.

        Raises:
            UnsupportedModelError: a layer keeps something that neither stays the same nor is as large for any text nor
                has an entry for each token.
        """
        if [type_ for type_, _ in short.layers] != [type_ for type_, _ in long.layers]:
            raise UnsupportedModelError("the model's cache has other layers for rows of another length")
        tensors: list[KeptTensor] = []
        states: list[StateSpec] = []
        others: list[tuple[type, _State]] = []
        counts: set[tuple[int, str]] = set()
        for index, ((layer_class, one), (_, other)) in enumerate(zip(short.layers, long.layers, strict=True)):
            same: _State = {}
            for name in sorted(one.keys() | other.keys()):
                a, b = one.get(name), other.get(name)
                dim = _token_dim(a, b, (short.num_tokens, long.num_tokens))
                if dim is not None and isinstance(b, torch.Tensor):
                    tensors.append(_kept(index, name, dim, b, page_dtype))
                elif type(a) is int and (a, b) == (short.num_tokens, long.num_tokens):
                    counts.add((index, name))
                elif _is_same(a, b):
                    same[name] = b
                elif (found := _states(index, name, single, (a, b))) is not None:
                    states += found
                    same[name] = b
                else:
                    raise UnsupportedModelError(
                        f"cache layer {index} ({layer_class.__name__}) keeps .{name}, which is not for each token"
                    )
            others.append((layer_class, same))
        if not tensors and not states:
            raise UnsupportedModelError("no layer stores anything in the cache")
        tensors.sort(key=lambda tensor: (tensor.layer, tensor.name))
        return cls(tuple(tensors), tuple(states), tuple(others), frozenset(counts))

    def filled(self, num_tokens: int, tensors: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()) -> Any:
        """A cache that holds so many tokens.

        Args:
            num_tokens: more than none.
            tensors: what they take, in the order of `self.tensors`.
            states: what they have come to, in the order of `self.states`; each [1, ...].
        """
        parts = [{name: _copied(value) for name, value in same.items()} for _, same in self.others]
        for index, name in self.counts:
            parts[index][name] = num_tokens
        for kept, tensor in zip(self.tensors, tensors, strict=True):
            parts[kept.layer][kept.name] = tensor
        for spec, state in zip(self.states, states, strict=True):
            leaves, form = pytree.tree_flatten(parts[spec.layer][spec.kind])
            leaves[spec.index] = state
            parts[spec.layer][spec.kind] = pytree.tree_unflatten(leaves, form)
        made = [_made(part_class, part) for (part_class, _), part in zip(self.others, parts, strict=True)]
        if isinstance(made[-1], Cache):
            made[-1].layers = made[:-1]
        return made[-1]

    def tensors_of(self, cache: Any, num_tokens: int) -> list[torch.Tensor]:
        """What a cache that holds so many tokens keeps, in the order of `self.tensors`.

        Raises:
            UnsupportedModelError: it does not have an entry for each token any more.
        """
        found = []
        for kept in self.tensors:
            tensor = _attributes(_parts(cache)[kept.layer]).get(kept.name)
            if not isinstance(tensor, torch.Tensor) or tensor.shape[kept.dim] != num_tokens:
                raise UnsupportedModelError(
                    f"cache layer {kept.layer} keeps .{kept.name} of {_extent(tensor)} after {num_tokens} tokens"
                )
            found.append(tensor)
        return found

    def states_of(self, cache: Any) -> list[torch.Tensor]:
        """What a cache that holds tokens has come to, each [1, ...], in the order of `self.states`.

        Raises:
            UnsupportedModelError: a state has another size than before.
        """
        parts = [_attributes(part) for part in _parts(cache)]
        found = []
        for spec in self.states:
            state = pytree.tree_leaves(parts[spec.layer].get(spec.kind))[spec.index]
            if not isinstance(state, torch.Tensor) or state.shape != (1, *spec.shape):
                raise UnsupportedModelError(
                    f"cache layer {spec.layer} keeps .{spec.kind} of {_extent(state)}, and kept {(1, *spec.shape)}"
                )
            found.append(state)
        return found


@dataclass(frozen=True)
class Snapshot:
    """What was in a cache at some time.

    Attributes:
        num_tokens: that it held.
        layers: class and attributes of each layer, and last of the cache itself.
    """

    num_tokens: int
    layers: tuple[tuple[type, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, cache: Any, num_tokens: int) -> Snapshot:
        """Take it now."""
        parts = _parts(cache)
        states = [{name: _taken(value) for name, value in _attributes(part).items()} for part in parts]
        if isinstance(cache, Cache):
            del states[-1]["layers"]
        return cls(num_tokens, tuple(zip(map(type, parts), states, strict=True)))


def _parts(cache: Any) -> list[Any]:
    """The layers of a cache, and the cache itself."""
    return [*(cache.layers if isinstance(cache, Cache) else ()), cache]


def _attributes(part: Any) -> Mapping[str, Any]:
    """What a part of a cache is made of; a plain container is its only one."""
    return {_ITSELF: part} if isinstance(part, list | tuple | dict) else vars(part)


def _made(part_class: type, attributes: _State) -> Any:
    if _ITSELF in attributes:
        return attributes[_ITSELF]
    part: Any = object.__new__(part_class)
    vars(part).update(attributes)
    return part


def _taken(value: Any) -> Any:
    """What stays as it is when the cache goes on."""
    if isinstance(value, list | tuple | dict | torch.Tensor):
        return pytree.tree_map_only(torch.Tensor, torch.clone, value)
    return value


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict) else value


def _kept(layer: int, name: str, dim: int, tensor: torch.Tensor, page_dtype: torch.dtype) -> KeptTensor:
    kept = KeptTensor(layer, name, dim, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]), tensor.dtype, page_dtype)
    if math.prod(kept.shape) * tensor.dtype.itemsize % page_dtype.itemsize:
        raise UnsupportedModelError(f"cache layer {layer} keeps .{name} of {tensor.dtype}, which does not fill pages")
    return kept


def _token_dim(one: Any, other: Any, counts: tuple[int, int]) -> int | None:
    first, second = shapes_of((one, other))
    try:
        return token_dim(first, second, counts)
    except ValueError:
        return None


def _states(layer: int, name: str, single: Snapshot | None, pair: tuple[Any, Any]) -> list[StateSpec] | None:
    """States among the leaves of an attribute's values; None where something differs that is no state."""
    if single is None or name not in single.layers[layer][1]:
        return None
    values = single.layers[layer][1][name], *pair
    leaves, forms = zip(*map(pytree.tree_flatten, values), strict=True)
    if any(form != forms[0] for form in forms):
        return None
    found = []
    for index, (one, other, another) in enumerate(zip(*leaves, strict=True)):
        shapes = {tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in (one, other, another)}
        shape = shapes.pop()
        if not shapes and shape and shape[0] == 1:
            found.append(StateSpec(layer, index, name, shape[1:], one.dtype))
        elif not (_is_same(one, other) and _is_same(other, another)):
            return None
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_is_same(value, other[key]) for key, value in one.items())
        )
    return type(one) is type(other) and bool(one == other)


def _extent(tensor: Any) -> str:
    return str(tuple(tensor.shape)) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
