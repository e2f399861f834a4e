"""Tiny random models that embed or score texts, in folders as sentence-transformers and Transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.zoo.tokenizer import tokenizer
from transfuse.models.shrink import randomise

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 8}
# By the name of the model's type in Transformers, what differs.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48},
    "mpnet": {"pad_token_id": 1},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "nomic_bert": {},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "t5": {"d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 48, "d_kv": 8},
    "qwen3": _DECODER,
    "gemma2": {**_DECODER, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "llama": _DECODER,
}
CAUSAL = ("qwen3", "gemma2", "llama")


def save_model(name: str, folder: Path, *, head: str = "none", **more: Any) -> Path:
    """Save a random model of a type with a tokenizer, and return its folder.

    Args:
        name: of `MODELS`.
        folder: where to.
        head: `none`, `classifier` or `lm`.
        more: settings of its config.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.modeling_utils import PreTrainedModel

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = AutoConfig.for_model(name, **special | _SIZES | MODELS[name] | more)
    classes = {"none": AutoModel, "classifier": AutoModelForSequenceClassification, "lm": AutoModelForCausalLM}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = classes[head].from_config(config, dtype=torch.float32)
    randomise(model.eval())
    model.save_pretrained(folder)
    made = tokenizer()
    made._tokenizer.post_processor = _specials()
    made.save_pretrained(folder)
    return folder


def _specials() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )


def add_pooling(
    folder: Path, *modes: str, normalises: bool = True, about: dict[str, Any] | None = None, **pooling: Any
) -> Path:
    """Write the files of sentence-transformers into a model's folder.

    Args:
        folder: of the model.
        modes: `cls_token`, `mean_tokens` and so on.
        normalises: whether vectors get length 1.
        about: of `config_sentence_transformers.json`.
        pooling: further settings of the pooling.
    """
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": paths[step], "type": f"sentence_transformers.models.{step}"}
        for i, step in enumerate(steps)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True for mode in modes} | pooling)
    if about is not None:
        write_json(folder / "config_sentence_transformers.json", about)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@torch.no_grad()
def hidden_states(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """What Transformers alone gives for each text [n, H]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    return [
        model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64))[0][0]
        for ids in texts
    ]
