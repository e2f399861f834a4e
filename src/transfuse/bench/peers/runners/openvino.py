"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

import argparse
import itertools
from importlib import import_module
from typing import Any

import numpy as np

from transfuse.bench.peers.protocol import Generate, runner_parser, serve
from transfuse.bench.peers.workloads import Prompt


def load(args: argparse.Namespace) -> Generate:
    """Load the model into a pipeline."""
    openvino, genai = import_module("openvino"), import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.num_threads, "ENABLE_CPU_PINNING": False}
    if args.cache_dir:
        properties["CACHE_DIR"] = args.cache_dir
    if args.kv_cache_precision:
        properties["KV_CACHE_PRECISION"] = args.kv_cache_precision
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    request_ids = itertools.count(1)

    def config(max_tokens: int) -> Any:
        made = genai.GenerationConfig()
        made.max_new_tokens = made.min_new_tokens = max_tokens
        made.ignore_eos = True
        made.do_sample = False
        return made

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        handles = [
            pipeline.add_request(next(request_ids), openvino.Tensor(np.array([prompt], dtype=np.int64)), config(count))
            for prompt, count in zip(prompts, max_tokens, strict=True)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    return generate


def main() -> None:
    """Parse the command line and serve."""
    parser = runner_parser(__doc__)
    parser.add_argument("model", help="folder that optimum-cli exported")
    parser.add_argument("--kv-cache-precision", help="for example u8 or bf16; default: OpenVINO's own choice")
    parser.add_argument("--cache-dir", help="where compiled models are kept between starts")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
