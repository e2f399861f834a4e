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
from transfuse.layers.replaced_forwards import forwards_replaced
from transfuse.layers.token_dims import TokenDims


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
        self._dims = TokenDims(self._name)

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
        if not self._dims.is_settled:
            (row,) = rows
            result = call.run(row, leaves)
            self._dims.see(row.stop, leaves, pytree.tree_leaves(result))
            return result
        dims = self._dims.given
        parts = [call.run(row, [_part(leaf, dim, row) for leaf, dim in zip(leaves, dims, strict=True)]) for row in rows]
        return self._joined(parts, self._dims.num_tokens(leaves))

    def _joined(self, parts: Sequence[Any], num_tokens: int) -> Any:
        leaves, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
        columns = zip(*leaves, strict=True)
        found = [
            column[0] if dim is None else _row(column, dim, num_tokens)
            for column, dim in zip(columns, self._dims.result, strict=True)
        ]
        return pytree.tree_unflatten(found, specs[0])

    def settle(self) -> None:
        """Fix which dimensions count tokens, from the forwards so far; see `TokenDims.settle`."""
        self._dims.settle()


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
    with forwards_replaced(layers):
        yield list(layers.values())


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
