"""Bounds single requests: what can never run to its end, and how much of one a step may compute."""

from __future__ import annotations

from transfuse.config import SchedulerConfig
from transfuse.engine.block_tables import BlockTables
from transfuse.engine.request import Request
from transfuse.errors import CapacityError

# Every token of a prompt whose log-probabilities are wanted has a row of logits, as wide as the vocabulary.
PROMPT_LOGPROBS_CHUNK = 256


def longest_chunk(request: Request, config: SchedulerConfig) -> int:
    """The most tokens of a request that one step computes, for reasons of the request's own."""
    if config.replays_outputs:
        return 1 if request.num_computed_tokens else request.num_prompt_tokens
    if request.params.prompt_logprobs is None or not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    return PROMPT_LOGPROBS_CHUNK


def check_capacity(request: Request, config: SchedulerConfig, tables: BlockTables, num_blocks: int) -> None:
    """Check that a request of full length fits in the model's length, in a step and, alone, in the pool.

    Args:
        request: the request.
        config: limits.
        tables: counts the blocks.
        num_blocks: blocks of the pool, without the null block.

    Raises:
        CapacityError: it does not fit.
    """
    num_prompt, name = request.num_prompt_tokens, f"Request {request.request_id!r}"
    num_tokens = num_prompt + request.max_tokens
    asks = f"{num_prompt} prompt tokens and max_tokens={request.max_tokens}"
    if num_tokens > config.max_model_len:
        raise CapacityError(
            f"{name} asks for {num_tokens} tokens ({asks}); the limit is max_model_len={config.max_model_len}. "
            "Shorten the prompt, lower max_tokens or raise --max-model-len."
        )
    whole = 1 if config.enable_chunked_prefill else num_prompt
    if whole > config.max_num_batched_tokens:
        raise CapacityError(
            f"{name} has {num_prompt} prompt tokens; without chunked prefill the limit is "
            f"max_num_batched_tokens={config.max_num_batched_tokens}. "
            "Shorten the prompt, enable chunked prefill or raise --max-num-batched-tokens."
        )
    # The last token ends the request, so its keys and values are never computed.
    needed = tables.peak_blocks(num_tokens - 1, whole=whole)
    if needed > num_blocks:
        raise CapacityError(
            f"{name} needs {needed} cache blocks of {config.block_size} tokens ({asks}); the cache has {num_blocks}. "
            "Shorten the prompt, lower max_tokens or give the cache more memory."
        )
