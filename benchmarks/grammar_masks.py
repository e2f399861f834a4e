"""What grammars cost a step: what sampling takes longer with them than without, as a share of the steps of a batch.

python -m benchmarks.grammar_masks MODEL --batch 16 --num-threads 2

By the clock and, for a machine that others use too, of the processor, in all threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transfuse import LLM, SamplingParams, StructuredOutputsParams
from transfuse.engine.engine import Engine
from transfuse.engine.sampler import Sampler

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
    """Seconds of each call of functions, by name: by the clock, and of the processor in all threads."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, float]]] = {}

    def watch(self, owner: Any, name: str) -> None:
        """Take down every call from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock, processor = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                calls = self.calls.setdefault(name, [])
                calls.append((time.perf_counter() - clock, time.process_time() - processor))

        setattr(owner, name, timed)

    def take(self) -> dict[str, list[tuple[float, float]]]:
        """What was taken down since the last time."""
        calls, self.calls = self.calls, {}
        return calls


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step, and those of it that sampling takes: by the clock, and of the processor."""

    step: npt.NDArray[np.float64]
    sample: npt.NDArray[np.float64]

    @classmethod
    def of(cls, calls: dict[str, list[tuple[float, float]]]) -> Cost:
        """Medians: a step that a neighbour disturbed is left out. The first step computes the prompts."""
        return cls(*(1e3 * np.median(calls[name][1:], axis=0) for name in ("step", "sample")))


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
    clock.watch(Sampler, "sample")
    settings = {"dtype": arguments.dtype, "num_threads": arguments.num_threads, "max_num_seqs": arguments.batch}
    with LLM(arguments.model, show_progress=False, **settings) as llm:
        for temperature in (0.0, 1.0):
            free = None
            for name, asked in ASKED.items():
                params = [
                    SamplingParams(
                        max_tokens=arguments.tokens,
                        temperature=temperature,
                        top_p=0.9,
                        seed=seed,
                        ignore_eos=True,
                        structured_outputs=asked,
                    )
                    for seed in range(arguments.batch)
                ]
                llm.generate([PROMPT] * arguments.batch, params, use_tqdm=False)  # compiles, and warms up
                clock.take()
                llm.generate([PROMPT] * arguments.batch, params, use_tqdm=False)
                cost = Cost.of(clock.take())
                free = cost if free is None else free
                print(f"temperature {temperature:g}, {name:12} {_line(cost, free)}", flush=True)


def _line(cost: Cost, free: Cost) -> str:
    masks = cost.sample - free.sample
    parts = [
        f"{step:.2f} ms a step, sampling {sample:.2f}, of which masks {mask:.2f} ({mask / step:.1%})"
        for step, sample, mask in zip(cost.step, cost.sample, masks, strict=True)
    ]
    return f"by the clock {parts[0]}; of the processor {parts[1]}"


if __name__ == "__main__":
    main()
