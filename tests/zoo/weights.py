"""Builds the tiny models with weights that make every part of them matter, and writes them as checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from tests.zoo.configs import MODEL_TYPES, tiny_config
from tests.zoo.data.init_styles import InitStyle, init_style
from tests.zoo.data.notes import DECODER_CONFIG
from tests.zoo.tokenizer import tokenizer

# A norm outside any list of layers, that is the one in front of the head.
_FINAL_NORM = re.compile(r"^(?!.*(\.\d+\.|emb)).*(norm|ln_f|layernorm)\w*\.weight$", re.I)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The tiny model of a type or of `type:variant`: float32, in eval mode, weights drawn from `seed`.

    The global random state is left as it was.
    """
    model_type = name.partition(":")[0]
    config = tiny_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model_type in DECODER_CONFIG:
            cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
            model = cls(getattr(config, DECODER_CONFIG[model_type]))
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.float().eval()
    reinit(model, init_style(name), seed)
    model.generation_config.do_sample = False
    return model


def save(name: str, folder: str | Path, seed: int = 0) -> None:
    """Write the safetensors checkpoint, the config and the tokenizer of `build(name, seed)` to `folder`."""
    save_model(name, build(name, seed), folder)
    tokenizer().save_pretrained(folder)


def save_model(name: str, model: PreTrainedModel, folder: str | Path) -> None:
    """Write a built model and a config that the auto classes know."""
    model.save_pretrained(folder)
    if model.config.model_type not in MODEL_TYPES:  # a text config that no auto class maps: keep the composite one
        config = tiny_config(name)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)


@torch.no_grad()
def reinit(model: PreTrainedModel, style: InitStyle, seed: int = 0) -> None:
    """Re-draw every weight so that a mistake anywhere changes the greedy tokens.

    Matrices: normal, std gain/sqrt(fan_in). Embeddings: normal, std `embed`. Vectors and constants (norm weights,
    biases, sinks, scales, temperatures, A_log, D, correction buffers): what the model chose, plus noise. With tied
    embeddings the final norm also gets random signs, or every token would predict itself.
    """
    redraw = _Redraw(model, style, seed)
    for name, tensor in _tensors(model):
        redraw(name, tensor)
    for module in model.modules():  # the padding row is zero, as every initialisation (and youtu's loading) leaves it
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then the floating-point buffers that a checkpoint holds."""
    persistent = set(model.state_dict(keep_vars=True))
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            yield name, buffer


class _Redraw:
    """Draws the tensors of one model in turn from one generator."""

    def __init__(self, model: PreTrainedModel, style: InitStyle, seed: int) -> None:
        self.style = style
        self.rules = [(re.compile(rule.pattern), rule) for rule in style.rules]
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.owners = {
            id(p): (module, leaf) for module in model.modules() for leaf, p in module.named_parameters(recurse=False)
        }
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        self.head_weight: torch.Tensor | None = getattr(head, "weight", None)
        self.tied = self.head_weight is not None and self.head_weight is getattr(embedding, "weight", None)

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float32).to(like.dtype)

    def __call__(self, name: str, p: torch.Tensor) -> None:
        style = self.style
        module, leaf = self.owners.get(id(p), (None, ""))
        rule = next((rule for pattern, rule in self.rules if pattern.search(name)), None)
        if rule is not None:
            mean = p if rule.mean is None else torch.full_like(p, rule.mean)
            p.copy_(mean + rule.std * self.noise(p))
        elif self.tied and p.ndim == 1 and _FINAL_NORM.search(name):
            shift = 1.0 if p.abs().max() == 0 else 0.0  # norms that scale by 1 + weight start at zero
            p.copy_(self.noise(p).sign() * (1 + style.jitter * self.noise(p)) - shift)
        elif module is None:
            if "bias" in name:  # of the buffers, only the routers' correction biases are free to move
                p.add_(0.1 * self.noise(p))
        elif isinstance(module, nn.Embedding):
            p.copy_(style.embed * self.noise(p))
        elif p is self.head_weight:
            p.copy_(style.head / math.sqrt(p.shape[-1]) * self.noise(p))
        elif _is_matrix(module, leaf, p):
            p.copy_(style.gain / math.sqrt(_fan_in(module, p)) * self.noise(p))
        else:
            p.add_(style.jitter * self.noise(p))


def _is_matrix(module: nn.Module, leaf: str, p: torch.Tensor) -> bool:
    if isinstance(module, nn.Conv1d | nn.Conv2d) and leaf == "weight":
        return True
    return p.ndim >= 2 and min(p.shape[-2:]) > 1 and "norm" not in leaf and bool(p.float().std() > 0)


def _fan_in(module: nn.Module, p: torch.Tensor) -> float:
    if isinstance(module, nn.Linear):
        return p.shape[-1]
    if isinstance(module, Conv1D):
        return p.shape[0]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return math.prod(p.shape[1:])
    return math.sqrt(p.shape[-1] * p.shape[-2])  # stacked experts and bare matrices: layout unknown
