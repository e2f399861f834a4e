"""Layers in the spellings that people use, which have to fuse by what they compute."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

SIZE, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8


class OffsetNorm(nn.Module):
    """Weights around zero, in float32."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.zeros(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        floats = inputs.float()
        scale = (floats.square().mean(dim=-1, keepdim=True) + 1e-5) ** -0.5
        return ((1 + self.g.float()) * (scale * floats)).type_as(inputs)


class BareNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)


class LibraryNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (SIZE,), self.scale, 1e-5)


class WrittenLayerNorm(nn.Module):
    """Without a bias, centred twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt(variance + 1e-5))


class GatedNorm(nn.Module):
    """A gate after the norm, or before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))


class GateAfterNorm(GatedNorm):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        floats = x.float()
        x = (floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        return (x * functional.silu(z.float())).to(x.dtype)


class GateBeforeNorm(GatedNorm):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = x * torch.sigmoid(z)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class ShortNames(nn.Module):
    """wq, wk, wv, wo."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(SIZE, HEADS * HEAD, bias=True)
        self.wk = nn.Linear(SIZE, KV_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(SIZE, KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, HEAD).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, HEAD).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, HEAD).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, -1))


class OptionalValue(nn.Module):
    """A guard on a projection that may not be there, calls by keyword, and one return before another."""

    def __init__(self, has_value: bool) -> None:
        super().__init__()
        self.wq = nn.Linear(SIZE, SIZE)
        self.wk = nn.Linear(SIZE, SIZE)
        self.wv = nn.Linear(SIZE, SIZE) if has_value else None

    def forward(self, x: torch.Tensor, only_query: bool = False) -> torch.Tensor:
        q = self.wq(input=x)
        if only_query:
            return q
        k = self.wk(x)
        v = self.wv(x) if self.wv is not None else k
        return q * torch.softmax(k, -1) + v


class Packed(nn.Module):
    """Queries, keys and values in one weight, group by group."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.qkv = nn.Linear(SIZE, (HEADS + 2 * KV_HEADS) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        if self.interleaved:
            packed = self.qkv(x).view(batch, length, KV_HEADS, HEADS // KV_HEADS + 2, HEAD)
            q = packed[:, :, :, :-2].reshape(batch, length, HEADS, HEAD)
            k, v = packed[:, :, :, -2], packed[:, :, :, -1]
        else:
            q, k, v = self.qkv(x).split((HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD), dim=-1)
            q, k, v = (part.view(batch, length, -1, HEAD) for part in (q, k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


class Glu(nn.Module):
    """Gated linear units: one class for each spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(SIZE, 48, bias=False)
        self.w3 = nn.Linear(SIZE, 48, bias=True)
        self.w2 = nn.Linear(48, SIZE, bias=False)


class InlineGlu(Glu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class SwappedGlu(Glu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x)
        up = self.w3(x)
        return self.w2(up * functional.gelu(gate, approximate="tanh"))


class SigmoidGlu(Glu):
    """The activation written out, the input's name used again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, x = self.w1(x), self.w3(x)
        gate = gate * torch.sigmoid(gate)
        x = torch.mul(x, gate)
        return self.w2(x)


class ClampedGlu(Glu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x).clamp(max=0.2)
        up = self.w3(x).clamp(min=-0.2, max=0.2)
        return self.w2((up + 1) * (gate * torch.sigmoid(gate * 1.702)))


class PackedGlu(nn.Module):
    """Gate and up in one weight, one class for each layout."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Linear(SIZE, 96)
        self.w2 = nn.Linear(48, SIZE)


class HalvesGlu(PackedGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.w13(x)
        gate, x = x.chunk(2, dim=-1)
        return self.w2(functional.silu(gate) * x)


class SecondHalfGlu(PackedGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.w13(x).split(48, dim=-1)
        return self.w2(functional.silu(gate) * up)


class InterleavedGlu(PackedGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.w13(x)
        gate, up = packed[..., ::2], packed[..., 1::2]
        return self.w2(functional.silu(gate) * up)


def own_gelu(x: torch.Tensor) -> torch.Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + torch.tanh(inner))


class PlainMlp(nn.Module):
    """An activation that is a function of its own, and a matrix kept the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = Turned(SIZE, 64)
        self.c_proj = Turned(64, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        x = own_gelu(x)
        return self.c_proj(x)


class Turned(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, out) * 0.2)
        self.b = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.b


class Renamed(nn.Linear):
    """A subclass that only has another name."""


class Stack(nn.Module):
    """Linear layers in a loop and in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Renamed(SIZE, SIZE) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.layers[0](x)


class Parallel(nn.Module):
    """Attention and feed-forward side by side after one norm, added in one go, and a norm of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = OffsetNorm(), OffsetNorm()
        self.attention, self.mlp = ShortNames(), SwappedGlu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = torch.add(x, self.attention(h) + 0.5 * self.mlp(h))
        return x + self.last(x)


class Sandwich(nn.Module):
    """Norms on both sides, and a factor on what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.then = OffsetNorm(), OffsetNorm(), OffsetNorm()
        self.mlp, self.more = InlineGlu(), SwappedGlu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.after(self.mlp(self.before(x)))
        x = residual + x * 0.25
        residual = x
        x = self.then(x)
        return residual + self.more(x)
