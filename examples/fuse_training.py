"""Trains a model with and without fused layers, side by side.

python examples/fuse_training.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from transfuse import fuse

STEPS = 20


def build(name: str | None) -> PreTrainedModel:
    """The model, with the same weights at every call: a folder or hub id, or a small Llama with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(model: PreTrainedModel) -> list[float]:
    """Losses of some steps on a sentence that is learnt by heart."""
    text = torch.tensor([list(b"The quick brown fox jumps over the lazy dog.")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(text, labels=text, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(name: str | None = None) -> None:
    """Trains the model as it is, fuses another copy, trains that, and compares."""
    plain = train(build(name))
    model = build(name)
    plan = fuse(model)
    print(f"{plan.num_fused_linears} of {plan.num_linears} linear layers are fused")
    for kind in plan.kinds:
        if kind.fusions:
            fusions = ", ".join(fusion.fuser for fusion in kind.fusions)
            print(f"  {len(kind.paths):>2} x {kind.module_class}: {fusions}")
    fused = train(model)
    print(f"loss: {fused[0]:.4f} at first, {fused[-1]:.4f} after {STEPS} steps")
    print("the same as unfused:", all(abs(one - other) < 1e-2 for one, other in zip(plain, fused, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
