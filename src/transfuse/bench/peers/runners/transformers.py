"""Transformers: `generate` on a padded batch, or its continuous batching."""

from __future__ import annotations

import argparse
from typing import Any

from transfuse.bench.peers.protocol import Generate, runner_parser, serve
from transfuse.bench.peers.workloads import Prompt

PAD = 2


def static_batch(model: Any) -> Generate:
    """All requests run to the longest output; only the tokens that were asked for are counted."""
    import torch

    @torch.inference_mode()
    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        width, steps = max(map(len, prompts)), max(max_tokens)
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
        num_new = out.shape[1] - width
        return [min(num_new, count) for count in max_tokens]

    return generate


def continuous_batching(model: Any) -> Generate:
    """Requests join and leave a running batch."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # 32k tokens of cache: the default takes a share of all memory (14 GB, and minutes to start).
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=PAD),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=1024, page_size=32, max_batch_tokens=2560),
    )
    manager.start()

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        index = {
            manager.add_request(prompt, max_new_tokens=count): i
            for i, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
        }
        counts: dict[int, int] = {}
        while len(counts) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching stopped; see its messages above")
            elif result.is_finished():
                counts[index[result.request_id]] = len(result.generated_tokens)
        return [counts[i] for i in range(len(prompts))]

    return generate


MODES = {"static": static_batch, "cb": continuous_batching}


def load(args: argparse.Namespace) -> Generate:
    """Load the model and start the mode that was asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.num_threads)
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return MODES[args.mode](model)


def main() -> None:
    """Parse the command line and serve."""
    parser = runner_parser(__doc__)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--mode", choices=tuple(MODES), default="static", help="cb: continuous batching")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float32 or float16")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
