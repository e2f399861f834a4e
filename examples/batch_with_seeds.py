"""Samples the same prompt with different seeds in one batch, and again alone: a seed gives its text either way.

python examples/batch_with_seeds.py [MODEL]
"""

from __future__ import annotations

import sys

from transfuse import LLM, SamplingParams

PROMPT = "The old lighthouse keeper"


def main(model: str | None = None) -> None:
    """Loads `model` (None: the default model) in float32 and compares the two ways of running."""
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=24) for seed in (1, 2, 3)]
    with LLM(model, dtype="float32") as llm:
        together = [output.outputs[0].text for output in llm.generate([PROMPT] * len(params), params)]
        alone = [llm.generate(PROMPT, each)[0].outputs[0].text for each in params]
    for each, text in zip(params, together, strict=True):
        print(f"seed {each.seed}: {text!r}")
    print("the same alone:", together == alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
