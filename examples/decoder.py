"""Four decoder layers in pure PyTorch (grouped-query attention, SwiGLU, RMSNorm), as a model to inspect.

python examples/decoder.py
transfuse inspect examples/decoder.py:Decoder
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight`."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns pairs of dimensions by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and value head."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.groups = num_heads // num_kv_heads
        self.wq = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [B, T, H]."""
        batch, length, _ = x.shape
        query = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key = key.repeat_interleave(self.groups, dim=1)
        value = value.repeat_interleave(self.groups, dim=1)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
        weights = functional.softmax(scores + mask, dim=-1)
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, -1)
        return self.wo(mixed)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, inner_size, bias=False)
        self.w3 = nn.Linear(hidden_size, inner_size, bias=False)
        self.w2 = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [B, T, H]."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, inner_size: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, num_kv_heads)
        self.ffn_norm = RMSNorm(hidden_size)
        self.ffn = FeedForward(hidden_size, inner_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [B, T, H]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        x = x + self.ffn(self.ffn_norm(x))
        return x


class Decoder(nn.Module):
    """A stack of layers over hidden states."""

    def __init__(
        self,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 8,
        num_kv_heads: int = 2,
        inner_size: int = 736,
    ) -> None:
        super().__init__()
        sizes = hidden_size, num_heads, num_kv_heads, inner_size
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(num_layers))
        self.head_dim = hidden_size // num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [B, T, H]."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device, dtype=x.dtype) / self.head_dim)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return x


def main() -> None:
    """Builds the decoder and runs it once."""
    torch.manual_seed(0)
    decoder = Decoder()
    result = decoder(torch.randn(1, 16, 256))
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    print(f"{num_parameters:,} parameters, hidden states {list(result.shape)}")


if __name__ == "__main__":
    main()
