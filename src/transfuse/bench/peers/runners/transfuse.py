"""Transfuse through its Python API."""

from __future__ import annotations

import argparse
import json

from transfuse.bench.peers.protocol import Generate, runner_parser, serve
from transfuse.bench.peers.workloads import Prompt

CACHE_BYTES = 2 * 2**30  # as the other engines are given


def load(args: argparse.Namespace) -> Generate:
    """Load the model into an LLM."""
    from transfuse import LLM, SamplingParams

    settings = dict(
        model_impl=args.model_impl,
        dtype=args.dtype,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=CACHE_BYTES,
        num_threads=args.num_threads,
    )
    llm = LLM(args.model, **settings | args.engine_args)

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def main() -> None:
    """Parse the command line and serve."""
    parser = runner_parser(__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; nothing: the default model")
    parser.add_argument("--model-impl", default="auto", help="auto, fused, plain or original")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float32 or float16")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="more settings of LLM")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
