"""How many prompts give the same greedy tokens alone and in batches, with rows padded and without.

python -m benchmarks.row_padding MODEL --dtype bfloat16
"""

from __future__ import annotations

import argparse

import torch

import transfuse.engine.step_inputs as step_inputs
from transfuse import LLM, SamplingParams

BATCH_SIZES = (2, 3, 6, 12, 24)
NUM_PROMPTS = 24


def main() -> None:
    """Print, for each number of rows, how many prompts keep their tokens in every batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; nothing: the default model")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype=arguments.dtype, enable_prefix_caching=False, show_progress=False) as llm:
        for rows in (1, step_inputs.MIN_ROWS):
            step_inputs.MIN_ROWS = rows
            alone = _tokens(llm, 1)
            kept = [sum(map(list.__eq__, alone, _tokens(llm, size))) for size in BATCH_SIZES]
            print(f"at least {rows} rows: {kept} of {NUM_PROMPTS} prompts as alone in batches of {list(BATCH_SIZES)}")


def _tokens(llm: LLM, batch_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [{"prompt_token_ids": torch.randint(100, 1000, (n,), generator=generator).tolist()} for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    outputs = []
    for start in range(0, NUM_PROMPTS, batch_size):
        outputs += llm.generate(prompts[start : start + batch_size], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
