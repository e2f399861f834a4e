"""What grammars cost a step: the time for masks, and for all of sampling, as shares of the steps of a batch.

python -m benchmarks.grammar_masks MODEL --batch 16 --num-threads 1

Times are of the processor, in the thread that runs the engine, so that busy neighbours do not count; with several
threads, what the others compute is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from transfuse import LLM, SamplingParams, StructuredOutputsParams
from transfuse.engine import sampler
from transfuse.engine.engine import Engine
from transfuse.engine.grammar_masks import GrammarState

LINE_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "price": {"type": "number", "minimum": 0},
        "kind": {"enum": ["book", "record", "tool", "toy"]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "tags", "price", "kind", "note"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "items": {"type": "array", "items": LINE_ITEM, "minItems": 20}},
    "required": ["id", "items"],
    "additionalProperties": False,
}
PROMPT = "Write an order for a shop as JSON."
ASKED: dict[str, StructuredOutputsParams | None] = {
    "no grammar": None,
    "schema": StructuredOutputsParams(json=ORDER),
    "any object": StructuredOutputsParams(json_object=True),
    "expression": StructuredOutputsParams(regex="([A-Z][a-z]+ ){500}"),
}


class Clock:
    """Seconds spent in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def watch(self, owner: Any, name: str) -> None:
        """Count the time of every call from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - started
                self.calls[name] = self.calls.get(name, 0) + 1

        setattr(owner, name, timed)


def main() -> None:
    """Print a line for each kind of grammar, and for greedy and drawn tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; nothing: the default model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int)
    arguments = parser.parse_args()
    clock = Clock()
    clock.watch(Engine, "step")
    clock.watch(sampler.Sampler, "sample")
    clock.watch(sampler, "apply_grammars")
    clock.watch(GrammarState, "accept")
    settings = {"dtype": arguments.dtype, "num_threads": arguments.num_threads, "max_num_seqs": arguments.batch}
    with LLM(arguments.model, show_progress=False, **settings) as llm:
        for name, asked in ASKED.items():
            for temperature in (0.0, 1.0):
                params = [
                    SamplingParams(
                        max_tokens=arguments.tokens,
                        temperature=temperature,
                        top_p=0.9,
                        seed=seed,
                        structured_outputs=asked,
                    )
                    for seed in range(arguments.batch)
                ]
                llm.generate([PROMPT] * arguments.batch, params, use_tqdm=False)  # compiles, and warms up
                clock.seconds.clear(), clock.calls.clear()
                llm.generate([PROMPT] * arguments.batch, params, use_tqdm=False)
                print(f"{name:12} temperature {temperature:g}: {_line(clock)}")


def _line(clock: Clock) -> str:
    step, steps = clock.seconds["step"], clock.calls["step"]
    masks = clock.seconds.get("apply_grammars", 0.0) + clock.seconds.get("accept", 0.0)
    sampling = clock.seconds["sample"]
    return (
        f"{1e3 * step / steps:.2f} ms a step, masks {1e3 * masks / steps:.2f} ms ({masks / step:.1%}), "
        f"all of sampling {1e3 * sampling / steps:.2f} ms ({sampling / step:.1%})"
    )


if __name__ == "__main__":
    main()
