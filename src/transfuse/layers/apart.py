"""Has attention layers whose code needs a request to itself run on one request of a row after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from transfuse.errors import UnsupportedModelError
from transfuse.layers.ragged_cache import RaggedCache, RequestRows
from transfuse.layers.ragged_mask import RaggedMask


class OneRequest:
    """The cache as code that runs on one request sees it: that request's keys and values, in order.

    Args:
        cache: of the step.
        rows: the request.
        mask: what its new tokens see.
    """

    def __init__(self, cache: RaggedCache, rows: RequestRows, mask: RaggedMask) -> None:
        self._cache, self._rows, self._mask = cache, rows, mask

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the request's new keys and values; returns all that its new tokens may see."""
        return self._cache.extend(layer_idx, key_states, value_states, self._rows, self._mask)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the request in earlier steps."""
        return self._rows.past

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"an attention layer that runs on one request reads Cache.{name}")


_alone: ContextVar[OneRequest | None] = ContextVar("transfuse_alone", default=None)


def runs_alone() -> bool:
    """Whether the attention layer that is running sees one request only."""
    return _alone.get() is not None


def attend_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention [1, n, num_heads, dim] of one request's new tokens over all that they may see.

    Args:
        query: [1, num_heads, n, head_dim].
        key: [1, num_kv_heads, L, head_dim].
        value: [1, num_kv_heads, L, value_head_dim].
        mask: of bool, or added to the scores; broadcasts to [1, num_heads, n, L].
        scale: factor on the scores; None for 1 / sqrt(head_dim).
    """
    is_grouped = query.shape[1] != key.shape[1]
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )
    return found.transpose(1, 2)


@dataclass
class _Shapes:
    """Of what a layer was called with and gave back, leaf by leaf; None for what is no tensor."""

    num_tokens: int
    given: list[torch.Size | None]
    result: list[torch.Size | None]


class ApartLayer:
    """The forward of an attention layer, called for each request of a row.

    Which dimension of a tensor counts the row's tokens shows in two forwards over rows of unlike length. Then `settle`
    fixes it; until then a row is taken to be one request.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._forward: Callable[..., Any] = module.forward
        self._seen: list[_Shapes] = []
        self._given_dims: list[int | None] | None = None
        self._result_dims: list[int | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward with what belongs to one request, for each, and join the results."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        caches = [leaf for leaf in leaves if isinstance(leaf, RaggedCache)]
        masks = {leaf for leaf in leaves if isinstance(leaf, RaggedMask)}
        if len(caches) != 1 or len(masks) != 1:
            raise UnsupportedModelError(f"{self._name}.forward is handed {len(caches)} caches and {len(masks)} masks")
        (cache,), (mask,) = caches, masks
        call = _Call(self._forward, leaves, spec, cache, mask)
        rows = cache.requests()
        if self._given_dims is None:
            (row,) = rows
            result = call.run(row, leaves)
            self._seen.append(_Shapes(row.stop, _shapes(leaves), _shapes(pytree.tree_leaves(result))))
            return result
        dims = self._given_dims
        parts = [call.run(row, [_part(leaf, dim, row) for leaf, dim in zip(leaves, dims, strict=True)]) for row in rows]
        num_tokens = next(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
        return self._joined(parts, num_tokens)

    def _joined(self, parts: Sequence[Any], num_tokens: int) -> Any:
        leaves, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
        columns = zip(*leaves, strict=True)
        found = [
            column[0] if dim is None else _row(column, dim, num_tokens)
            for column, dim in zip(columns, self._result_dims, strict=True)
        ]
        return pytree.tree_unflatten(found, specs[0])

    def settle(self) -> None:
        """Fix which dimensions count tokens, from the forwards so far.

        Raises:
            UnsupportedModelError: they do not say it, or a result has no such dimension.
        """
        if not self._seen:
            return  # It did not run, and whoever calls it later is told so.
        first, second = self._seen[-2:]
        counts = (first.num_tokens, second.num_tokens)
        self._given_dims = self._dims(first.given, second.given, counts)
        self._result_dims = self._dims(first.result, second.result, counts)
        tensors = [dim for dim, shape in zip(self._result_dims, second.result, strict=True) if shape is not None]
        if None in tensors or all(dim is None for dim in self._given_dims):
            raise UnsupportedModelError(f"{self._name}.forward gives back something that is not for each token")

    def _dims(
        self, first: list[torch.Size | None], second: list[torch.Size | None], counts: tuple[int, int]
    ) -> list[int | None]:
        if len(first) != len(second):
            raise UnsupportedModelError(f"{self._name}.forward is not called alike for all rows")
        found: list[int | None] = []
        for one, other in zip(first, second, strict=True):
            pairs = [] if one is None or other is None else list(zip(one, other, strict=False))
            dims = [dim for dim, pair in enumerate(pairs) if pair[0] != pair[1]]
            if len(dims) > 1 or any(pairs[dim] != counts for dim in dims):
                raise UnsupportedModelError(
                    f"{self._name}.forward is handed or gives back a tensor of {tuple(other or ())} for "
                    f"{counts[1]} tokens, which cannot be parted by requests"
                )
            found.append(dims[0] if dims else None)
        return found


@dataclass
class _Call:
    forward: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    cache: RaggedCache
    mask: RaggedMask

    def run(self, rows: RequestRows, leaves: Sequence[Any]) -> Any:
        one = OneRequest(self.cache, rows, self.mask)
        mask = self.mask.of_request(rows.num_new, rows.past, _device(leaves))
        stand_ins: dict[type, Any] = {RaggedMask: mask}
        given = [one if isinstance(leaf, RaggedCache) else stand_ins.get(type(leaf), leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        token = _alone.set(one)
        try:
            result = self.forward(*args, **kwargs)
        finally:
            _alone.reset(token)
        return pytree.tree_map(lambda leaf: self.cache if leaf is one else leaf, result)


def _device(leaves: Sequence[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))


def _shapes(leaves: Sequence[Any]) -> list[torch.Size | None]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def _part(leaf: Any, dim: int | None, rows: RequestRows) -> Any:
    return leaf if dim is None else leaf.narrow(dim, rows.start, rows.num_new)


def _row(parts: Sequence[torch.Tensor], dim: int, num_tokens: int) -> torch.Tensor:
    """One tensor for all of a row's tokens; zero for those that pad it."""
    padding = num_tokens - sum(part.shape[dim] for part in parts)
    shape = [*parts[0].shape[:dim], padding, *parts[0].shape[dim + 1 :]]
    return torch.cat((*parts, parts[0].new_zeros(shape)), dim)


@contextmanager
def apart(model: nn.Module, classes: Collection[type[nn.Module]]) -> Iterator[list[ApartLayer]]:
    """Within it, the modules of these classes run on one request at a time."""
    layers = {module: ApartLayer(module) for module in model.modules() if type(module) in classes}
    before = {module: vars(module).get("forward") for module in layers}
    for module, layer in layers.items():
        module.forward = layer
    try:
        yield list(layers.values())
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def layer_to_blame(error: UnsupportedModelError, model: nn.Module) -> type[nn.Module] | None:
    """The class of the layer whose code did what a ragged batch cannot answer, None where it was no layer's.

    It is the innermost module that was handed the cache, if it is one of a list of layers or in one.
    """
    found: nn.Module | None = None
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        module = names.get("self")
        if isinstance(module, nn.Module) and _holds_cache(names):
            found = module
        trace = trace.tb_next
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    is_layer = found is not None and any(found in layers.modules() for layers in lists)
    return type(found) if found is not None and is_layer else None


def _holds_cache(names: dict[str, Any]) -> bool:
    values = list(names.values())
    values += [value for each in values if isinstance(each, dict) for value in each.values()]
    return any(isinstance(value, RaggedCache | OneRequest) for value in values)
