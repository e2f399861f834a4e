"""Serve several callers at once from a model in a process of its own, without HTTP.

python examples/async_generate.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from transfuse import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


async def ask(llm: AsyncLLM, prompt: str) -> str:
    """One caller: reads its answer as it grows."""
    text = ""
    async for answer in llm.generate(prompt, PARAMS):
        text = answer.outputs[0].text
    return text


async def main() -> None:
    """Ask three things at once; the engine runs them in one batch."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    prompts = ["The capital of France is", "Water boils at", "Once upon a time"]
    async with AsyncLLM(model, show_progress=False) as llm:
        for prompt, text in zip(prompts, await asyncio.gather(*(ask(llm, p) for p in prompts)), strict=True):
            print(f"{prompt!r} -> {text!r}")


asyncio.run(main())
