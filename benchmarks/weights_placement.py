"""Decode speed of Transformers' `generate` on weights as they are loaded, and as Transfuse places them, in turn.

python -m benchmarks.weights_placement FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from transfuse.models.placement import place_weights


def main() -> None:
    """Run the two in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="safetensors in the dtype to run in")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--num-tokens", type=int, default=64)
    arguments = parser.parse_args()
    loaded, placed = _load(arguments.folder), _load(arguments.folder)
    place_weights(placed)
    models = {"as loaded": loaded, "placed": placed}
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(arguments.repeats + 1):
        for name, model in models.items():
            seconds = _seconds_per_token(model, arguments.num_tokens, repeat)
            if repeat > 0:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:10} {median * 1e3:6.2f} ms a token")
    print(f"placed / as loaded: {medians['placed'] / medians['as loaded']:.3f}")


def _load(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.inference_mode()
def _seconds_per_token(model: PreTrainedModel, num_tokens: int, seed: int) -> float:
    prompt = torch.randint(100, 1000, (1, 32), generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False)
    return (time.perf_counter() - start) / num_tokens


if __name__ == "__main__":
    main()
