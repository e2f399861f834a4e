"""vLLM through its offline API."""

from __future__ import annotations

import argparse
import json
import os

from benchmarks.peers.paths import peers_dir
from benchmarks.peers.protocol import NUM_THREADS, Generate, serve
from benchmarks.peers.workloads import Prompt


def _set_environment() -> None:
    """Set the variables that vLLM reads when imported; those already given stay."""
    cache = peers_dir() / "cache"
    defaults = dict(
        VLLM_CPU_KVCACHE_SPACE="2",  # GiB
        VLLM_CPU_OMP_THREADS_BIND=f"0-{NUM_THREADS - 1}",
        VLLM_CACHE_ROOT=str(cache / "vllm"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load(args: argparse.Namespace) -> Generate:
    """Load the model into an LLM."""
    _set_environment()
    from vllm import LLM, SamplingParams

    settings = dict(
        model_impl=args.model_impl,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        disable_log_stats=True,
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("model_impl", nargs="?", default="vllm", help="vllm or transformers")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="more settings of LLM")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
