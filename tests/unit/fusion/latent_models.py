"""Attention over latents in spellings that no library has: other names, inline, and with keys and values cached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.zoo import build

HIDDEN, HEADS, RANK, OWN, SHARED, VALUE = 64, 4, 32, 16, 8, 12


def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat((-x[..., SHARED // 2 :], x[..., : SHARED // 2]), dim=-1) * sin

    return turned(q), turned(k)


class Latent(nn.Module):
    """What all of them have; their forwards differ."""

    def __init__(self, config: Any, layer_idx: int, bias: bool = False) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.wq = nn.Linear(HIDDEN, HEADS * (OWN + SHARED), bias=False)
        self.down = nn.Linear(HIDDEN, RANK + SHARED, bias=False)
        self.calm = nn.RMSNorm(RANK, eps=1e-6)
        self.up = nn.Linear(RANK, HEADS * (OWN + VALUE), bias=bias)
        self.wo = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.scale = 0.3

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.wq(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return q[..., :OWN], q[..., OWN:]

    def attend(self) -> Any:
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]


class Inline(Latent):
    """The cache is given latents, which are expanded without a helper."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
    ) -> Any:
        q, q_turned = self.queries(hidden_states)
        packed = self.down(hidden_states)
        c = self.calm(packed[..., :RANK]).unsqueeze(1)
        r = packed[..., RANK:].unsqueeze(1)
        q_turned, r = turn(q_turned, r, *position_embeddings)
        if cache is not None:
            c, r = cache.update(c, r, self.layer_idx)
        both = self.up(c).squeeze(1).unflatten(-1, (HEADS, OWN + VALUE)).transpose(1, 2)
        k, v = both[..., :OWN], both[..., OWN:]
        k = torch.cat([k, r.expand(-1, HEADS, -1, -1)], dim=-1)
        attend = self.attend()
        out, _ = attend(
            self, torch.cat([q, q_turned], -1), k, value=v, attention_mask=attention_mask, scaling=self.scale
        )
        return self.wo(out.flatten(2)), None


class Expanded(Latent):
    """The cache is given keys and values, as the first models of this kind had it."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
    ) -> Any:
        batch, length, _ = hidden_states.shape
        q, q_turned = self.queries(hidden_states)
        c, r = self.down(hidden_states).split([RANK, SHARED], dim=-1)
        r = r.view(batch, length, 1, SHARED).transpose(1, 2)
        kv = self.up(self.calm(c)).view(batch, length, HEADS, OWN + VALUE).transpose(1, 2)
        own, v = torch.split(kv, [OWN, VALUE], dim=-1)
        q_turned, r = turn(q_turned, r, *position_embeddings)
        k = own.new_empty(batch, HEADS, length, OWN + SHARED)
        k[:, :, :, :OWN] = own
        k[:, :, :, OWN:] = r
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, _ = self.attend()(self, torch.cat([q, q_turned], -1), k, v, attention_mask, scaling=self.scale)
        return self.wo(out.flatten(2)), None


class Changed(Latent):
    """Close to `Inline`, but for what `change` does."""

    def change(self, c: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
    ) -> Any:
        q, q_turned = self.queries(hidden_states)
        packed = self.down(hidden_states)
        c = self.calm(packed[..., :RANK]).unsqueeze(1)
        r = packed[..., RANK:].unsqueeze(1)
        q_turned, r = turn(q_turned, r, *position_embeddings)
        c, r = cache.update(c, r, self.layer_idx)
        both = self.up(c).squeeze(1).unflatten(-1, (HEADS, OWN + VALUE)).transpose(1, 2)
        k, v = self.change(c, both[..., :OWN], both[..., OWN:])
        k = torch.cat([k, r.expand(-1, HEADS, -1, -1)], dim=-1)
        out, _ = self.attend()(self, torch.cat([q, q_turned], -1), k, v, attention_mask, scaling=self.scale)
        return self.wo(out.flatten(2)), None


class Scaled(Changed):
    """Keys are not what the layer makes of latents."""

    def change(self, c: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k * 2.0, v


class Normed(Changed):
    """Keys are normalised head by head, which does not go through the queries."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_norm = nn.RMSNorm(OWN, eps=1e-6)

    def change(self, c: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_norm(k), v


class Residual(Changed):
    """Values are those of latents and something of the latent itself."""

    def change(self, c: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v + c[..., :VALUE]


class Looking(Changed):
    """The values are looked at besides."""

    def change(self, c: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.wo.weight.data += 0.0 * v.mean()
        return k, v


class Branching(Latent):
    """While it is trained, values are other ones."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
    ) -> Any:
        q, q_turned = self.queries(hidden_states)
        packed = self.down(hidden_states)
        c = self.calm(packed[..., :RANK]).unsqueeze(1)
        q_turned, r = turn(q_turned, packed[..., RANK:].unsqueeze(1), *position_embeddings)
        c, r = cache.update(c, r, self.layer_idx)
        k, v = self.up(c).squeeze(1).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([OWN, VALUE], dim=-1)
        k = torch.cat([k, r.expand(-1, HEADS, -1, -1)], dim=-1)
        if self.training:
            v = nn.functional.dropout(v, 0.1)
        out, _ = self.attend()(self, torch.cat([q, q_turned], -1), k, v, attention_mask, scaling=self.scale)
        return self.wo(out.flatten(2)), None


class Biased(Inline):
    """The layer that expands has a bias."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=True)


def model_of(*attention: type[Latent]) -> PreTrainedModel:
    """A small language model whose two layers have these kinds of attention, or one kind."""
    model = build("minicpm3")
    torch.manual_seed(11)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = attention[index % len(attention)](model.config, index)
    return model.eval()
