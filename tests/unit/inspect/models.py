"""Small modules of every kind that reports have to show."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from transfuse.inspect.report import Report, inspect_subject
from transfuse.inspect.subject import build_on_meta, config_subject
from transfuse.models.resolve import ModelSource


class Mlp(nn.Module):
    def __init__(self, size: int = 16, inner: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Mlp(inner=64 if i == 1 else 48) for i in range(num_layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Mlp()
        self.same = nn.ModuleDict({"other": self.one})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same["other"](self.one(x))


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        raise RuntimeError("no further </pre><script>alert(1)</script>")


Hostile = type("<img src=x onerror=alert(1)>", (Mlp,), {"__module__": __name__})


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.part = Hostile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x))


def llama_config(**changes: object) -> object:
    from transformers import LlamaConfig

    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    return LlamaConfig(**(sizes | changes))


def report_of(config: object, cache_dir: Path, dtype: torch.dtype = torch.bfloat16) -> Report:
    """The report on a Transformers model of this config."""
    source = ModelSource("folder", Path("model"), "model")
    module = build_on_meta(config, dtype, source, trust_remote_code=False)  # type: ignore[arg-type]
    return inspect_subject(config_subject("model", module), cache_dir)
