"""The cache that Transformers makes for one request, put together from pages and taken apart into them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from transfuse.cache.groups import LayerSpec
from transfuse.errors import UnsupportedModelError

# What such a layer is made of, by the name of the attribute.
_State = dict[str, Any]


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache as `generate` makes it, in which sliding layers keep every token: masks say what is seen."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


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
    """What the cache that Transformers makes for a model is made of.

    Attributes:
        tensors: that are kept, in the order of cache layers.
        others: per layer of the cache, its class and everything else that it has once there are tokens in it.
        counts: attributes that count tokens, with the index of their layer.
    """

    tensors: tuple[KeptTensor, ...]
    others: tuple[tuple[type, _State], ...]
    counts: frozenset[tuple[int, str]]

    @classmethod
    def of(cls, short: Snapshot, long: Snapshot, page_dtype: torch.dtype) -> OwnCacheForm:
        """Find it by comparing two caches that hold unlike numbers of tokens.

        Args:
            short: one of them.
            long: the one with more.
            page_dtype: of the numbers in pages.

        Raises:
            UnsupportedModelError: a layer keeps something that neither stays the same nor has an entry for each token.
        """
        if [type_ for type_, _ in short.layers] != [type_ for type_, _ in long.layers]:
            raise UnsupportedModelError("the model's cache has other layers for rows of another length")
        tensors: list[KeptTensor] = []
        others: list[tuple[type, _State]] = []
        counts: set[tuple[int, str]] = set()
        for index, ((layer_class, one), (_, other)) in enumerate(zip(short.layers, long.layers, strict=True)):
            same: _State = {}
            for name in sorted(one.keys() | other.keys()):
                a, b = one.get(name), other.get(name)
                dim = _token_dim(a, b, short.num_tokens, long.num_tokens)
                if dim is not None and isinstance(b, torch.Tensor):
                    tensors.append(_kept(index, name, dim, b, page_dtype))
                elif type(a) is int and (a, b) == (short.num_tokens, long.num_tokens):
                    counts.add((index, name))
                elif _is_same(a, b):
                    same[name] = b
                else:
                    raise UnsupportedModelError(
                        f"cache layer {index} ({layer_class.__name__}) keeps .{name}, which is not for each token"
                    )
            others.append((layer_class, same))
        if not tensors:
            raise UnsupportedModelError("no layer stores anything for each token in the cache")
        tensors.sort(key=lambda tensor: (tensor.layer, tensor.name))
        return cls(tuple(tensors), tuple(others), frozenset(counts))

    def fill(self, cache: Cache, num_tokens: int, tensors: Sequence[torch.Tensor]) -> None:
        """Make an empty cache one that holds so many tokens.

        Args:
            cache: from `new_cache`.
            num_tokens: more than none.
            tensors: what they take, in the order of `self.tensors`.
        """
        layers = []
        for layer_class, same in self.others:
            layer: Any = object.__new__(layer_class)
            vars(layer).update({name: _copied(value) for name, value in same.items()})
            layers.append(layer)
        for index, name in self.counts:
            setattr(layers[index], name, num_tokens)
        for kept, tensor in zip(self.tensors, tensors, strict=True):
            setattr(layers[kept.layer], kept.name, tensor)
        cache.layers = layers

    def tensors_of(self, cache: Cache, num_tokens: int) -> list[torch.Tensor]:
        """What a cache that holds so many tokens keeps, in the order of `self.tensors`.

        Raises:
            UnsupportedModelError: it does not have an entry for each token any more.
        """
        found = []
        for kept in self.tensors:
            tensor = getattr(cache.layers[kept.layer], kept.name, None)
            if not isinstance(tensor, torch.Tensor) or tensor.shape[kept.dim] != num_tokens:
                raise UnsupportedModelError(
                    f"cache layer {kept.layer} keeps .{kept.name} of {_extent(tensor)} after {num_tokens} tokens"
                )
            found.append(tensor)
        return found


@dataclass(frozen=True)
class Snapshot:
    """What was in a cache at some time.

    Attributes:
        num_tokens: that it held.
        layers: class and attributes of each layer.
    """

    num_tokens: int
    layers: tuple[tuple[type, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, cache: Cache, num_tokens: int) -> Snapshot:
        """Take it now."""
        states = [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers]
        return cls(num_tokens, tuple(zip(map(type, cache.layers), states, strict=True)))


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict) else value


def _kept(layer: int, name: str, dim: int, tensor: torch.Tensor, page_dtype: torch.dtype) -> KeptTensor:
    kept = KeptTensor(layer, name, dim, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]), tensor.dtype, page_dtype)
    if math.prod(kept.shape) * tensor.dtype.itemsize % page_dtype.itemsize:
        raise UnsupportedModelError(f"cache layer {layer} keeps .{name} of {tensor.dtype}, which does not fill pages")
    return kept


def _token_dim(one: Any, other: Any, first: int, second: int) -> int | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return None
    differing = [dim for dim, pair in enumerate(zip(one.shape, other.shape, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1 or (one.shape[differing[0]], other.shape[differing[0]]) != (first, second):
        return None
    return differing[0]


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
