"""The cache that Transformers code sees in a ragged batch: it stores new tokens and never claims a length."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers import Cache

from transfuse.errors import UnsupportedModelError
from transfuse.layers.listed_layers import ListedLayer
from transfuse.layers.ragged_mask import RaggedMask

if TYPE_CHECKING:
    from transfuse.layers.state_layer import StateGroup


class Unknown:
    """A length that has no meaning on a ragged row: it may be handed on, but not computed with."""

    def _refuse(self, *_: object) -> NoReturn:
        refuse_length()

    def __add__(self, other: object) -> Any:
        self._refuse()

    def __radd__(self, other: object) -> Any:
        return self + other

    __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = __floordiv__ = __mod__ = __neg__ = __getitem__ = _refuse

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        return id(self)


UNKNOWN = Unknown()


class PastLength(Unknown):
    """How many tokens came before the row: unlike for each request, so that only one sum with it has a meaning.

    Added to the numbers of the row's tokens, it gives their positions.

    Args:
        positions: from the numbers, [..., T], of the row's tokens to their positions, alike in shape; raises
            `UnsupportedModelError` where they are something else.
    """

    def __init__(self, positions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._positions = positions

    def __add__(self, other: object) -> Any:
        if not isinstance(other, torch.Tensor):
            self._refuse()
        return self._positions(other)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Where a request's new tokens are in the row.

    Attributes:
        index: of the request, in the order of the row.
        start: its first token.
        stop: after its last.
        past: its tokens of earlier steps.
    """

    index: int
    start: int
    stop: int
    past: int

    @property
    def num_new(self) -> int:
        """Its tokens in the row."""
        return self.stop - self.start


def refuse_length() -> NoReturn:
    """Say that a model computes with a length.

    Raises:
        UnsupportedModelError: always; it names the caller.
    """
    raise UnsupportedModelError(f"{_caller()} computes with a cache length, which a ragged batch does not have")


class RaggedCache(Cache, ABC):
    """Base of the caches for ragged batches: knows which cache layer a key belongs to, and refuses the rest of `Cache`.

    `update` returns the tensors it was given, and attention layers hand them to the attention function. Which cache
    layer they belong to is found by their identity, not by the module: a looped model calls one module for several
    cache layers, and layers that share keys are handed another layer's tensors.

    Some models attend to what they derive from these tensors instead, such as keys and values expanded from a latent.
    On a ragged row the derivation is of the step's own tokens, so what is attended to is itself kept, and the tensors
    of the update are not.
    """

    # Not calling Cache.__init__ is the point: every attribute that it would set is refused by name instead.
    def __init__(self) -> None:
        self._layer_of_key: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._listed: list[ListedLayer] | None = None

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        value_head_dim: int,
    ) -> torch.Tensor:
        """Attention of the step's queries [T, num_heads, head_dim] over cache layer `layer`.

        Returns:
            [T, num_heads, value_head_dim].
        """

    @abstractmethod
    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        weight: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the step's queries [T, num_heads, head_dim] over a cache layer that keeps latents.

        The keys that were stored in the layer are latents, the values the part of the keys that all heads share.
        `weight` makes the rest of the keys, and the values, see `kernels.mla_ops.latent_attention`.

        Returns:
            [T, num_heads, value_head_dim].
        """

    @abstractmethod
    def requests(self) -> Sequence[RequestRows]:
        """The requests of the row, in order."""

    def state_groups(self) -> Sequence[StateGroup]:
        """The requests of the row, as layers that keep a state run on them."""
        _refuse_call("state_groups")

    @abstractmethod
    def extend(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, rows: RequestRows, mask: RaggedMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep one request's new keys and values as what the model calls its layer `layer_idx`.

        Args:
            layer_idx: as the model numbers it.
            key: [1, num_kv_heads, n, head_dim].
            value: [1, num_kv_heads, n, value_head_dim].
            rows: the request.
            mask: what the new tokens see.

        Returns:
            Keys and values of all tokens that a new one sees, [1, num_kv_heads, L, dim], for `RaggedMask.of_request`.
        """

    @abstractmethod
    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep `key` [T, num_kv_heads, head_dim] and `value` [T, num_kv_heads, value_head_dim] in a cache layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the row's keys and values, each [1, num_kv_heads, T, dim], and return them unchanged."""
        _check_row(key_states)
        self.keep_update(layer_idx, key_states, value_states)
        return key_states, value_states

    def keep_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep what the model hands to `update` as its layer `layer_idx`, in the cache layer of that number."""
        self._store_row(layer_idx, key, value)
        self._layer_of_key[id(key)] = (key, value, layer_idx)

    def _store_row(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))

    def keep_derived(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """Keep the row's keys and values that an attention layer was given and no `update` returned.

        Returns:
            The cache layer.

        Raises:
            UnsupportedModelError: they cannot come from the cache's, so that nothing says whose they are.
        """
        raise UnsupportedModelError("an attention layer attends to keys or values that are not the cache's")

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """The cache layer of an attention call: of the `update` that returned `key` and `value`, or one of its own.

        Raises:
            UnsupportedModelError: no `update` returned them and they cannot be kept.
        """
        found = self._layer_of_key.get(id(key))
        if found is None or found[1] is not value:
            _check_row(key)
            return self.keep_derived(key, value)
        return found[2]

    def forget_keys(self) -> None:
        """Drop the step's tensors."""
        self._layer_of_key.clear()

    def get_seq_length(self, layer_idx: int = 0) -> PastLength:
        """Of no meaning but for positions, which many models count from it if they are given none."""
        return PastLength(self.positions_of)

    @abstractmethod
    def positions_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Positions of the row's tokens, of which a model has made the numbers 0, 1, … [..., T].

        Raises:
            UnsupportedModelError: these are other numbers.
        """

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Unknown: asked for by Transformers' mask functions, which hand it on to `ragged_mask`."""
        return UNKNOWN

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        """Unknown: asked for by Transformers' mask functions, which hand it on to `ragged_mask`."""
        return UNKNOWN, UNKNOWN

    @property
    def layers(self) -> list[ListedLayer]:
        """The layers that Transformers' own cache would start with, to be counted and asked whether they have memory.

        Models may add to the list. Nothing is kept in it: a layer is what `update` names.
        """
        if self._listed is None:
            self._listed = self.list_layers()
        return self._listed

    @layers.setter
    def layers(self, layers: list[ListedLayer]) -> None:
        self._listed = layers

    def list_layers(self) -> list[ListedLayer]:
        """See `layers`."""
        _refuse_call("layers")

    @property
    def is_initialized(self) -> bool:
        """Whether all listed layers have memory."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """Empty: masks say which layers slide."""
        return []

    @property
    def is_linear(self) -> list[bool]:
        """Empty: no layer keeps a recurrent state."""
        return []

    @property
    def is_dummy(self) -> list[bool]:
        """Empty: every layer that stores keys is real."""
        return []

    @property
    def is_compileable(self) -> bool:
        """False: the tensors change with every step."""
        return False

    def __repr__(self) -> str:
        return type(self).__name__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_call(name)


def _check_row(key: torch.Tensor) -> None:
    if key.dim() != 4 or key.shape[0] != 1:
        raise UnsupportedModelError(
            f"{_caller()} stores keys of shape {tuple(key.shape)}; expected [1, heads, tokens, dim]"
        )


def _refuse_call(name: str) -> NoReturn:
    raise UnsupportedModelError(f"{_caller()} calls Cache.{name}, which has no meaning in a ragged batch")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RaggedCache, *args: object, **kwargs: object) -> NoReturn:
        _refuse_call(name)

    refuse.__name__ = name
    return refuse


def _caller() -> str:
    """`Class.method (file:line)` of the innermost frame that is the model's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") in (__name__, "transformers.cache_utils")
        or isinstance(frame.f_locals.get("self"), RaggedCache)
    ):
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
    return f"{name} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


def calling_module() -> nn.Module | None:
    """The innermost module whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


# What Cache offers and a ragged batch cannot answer must raise, not return the base class's guess.
for _name in dir(Cache):
    if not _name.startswith("_") and _name not in vars(RaggedCache):
        _member = getattr(Cache, _name)
        setattr(RaggedCache, _name, property(_refusing(_name)) if isinstance(_member, property) else _refusing(_name))
RaggedCache.__len__ = _refusing("__len__")
