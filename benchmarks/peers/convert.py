"""Makes the test models: SmolLM2-135M as a bfloat16 folder from its GGUF file, and a random one of Qwen3-0.6B size."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.peers.paths import models_dir

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France, and what is it famous for?"


def write_smollm2(source: Path, folder: Path) -> PreTrainedTokenizerBase:
    """Dequantise the GGUF file in `source` to a bfloat16 folder; returns its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):  # it is not quantised any more
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def print_sample(folder: Path) -> None:
    """Answer a question with the written model, for the eye."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    print(f"{folder}: {model.dtype}, {model.num_parameters()} parameters")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60, do_sample=False)[0]))


def write_random_qwen3(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A model of Qwen3-0.6B's shape with random weights, for speed alone; it borrows a tokenizer."""
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.dtype}, {model.num_parameters()} parameters")


def main() -> None:
    """Make both models below the folder of models."""
    models = models_dir()
    tokenizer = write_smollm2(models, models / "smollm2-135m-bf16")
    print_sample(models / "smollm2-135m-bf16")
    write_random_qwen3(models / "qwen3-0.6b-random", tokenizer)


if __name__ == "__main__":
    main()
