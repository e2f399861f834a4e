"""Continues a few prompts in one batch.

python examples/offline_generate.py [MODEL]
"""

from __future__ import annotations

import sys

from transfuse import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time"]


def main(model: str | None = None) -> None:
    """Loads `model` (None: the default model) and prints each prompt with its continuation."""
    with LLM(model) as llm:
        print(f"Runs {llm.model_impl}: {llm.model_impl_reason}")
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
