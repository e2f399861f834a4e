"""Log-probabilities in the two shapes of the API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from transfuse.outputs import Logprob, LogprobsAtPosition
from transfuse.server.openai.token_bytes import token_bytes
from transfuse.text.tokenizer import Tokenizer

# What the API has for "never": JSON knows no infinity.
_LOWEST = -9999.0


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsAtPosition | None],
    offset: int,
    tokenizer: Tokenizer,
) -> Logprobs:
    """Those of `/v1/completions`: four lists with one entry per token.

    Args:
        token_ids: the tokens.
        positions: by token; None for the first of a prompt, which nothing predicts.
        offset: characters before the first of them; further offsets count the texts of the tokens.
        tokenizer: for the text of a token without a position.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    for token, position in zip(token_ids, positions, strict=True):
        text = tokenizer.convert_ids_to_token_text(token) if position is None else _text(position[token])
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    # Unchecked, since the first entries are null with `echo`, which the type has no place for.
    return Logprobs.model_construct(
        text_offset=offsets,
        token_logprobs=[None if p is None else _value(p[token]) for token, p in zip(token_ids, positions, strict=True)],
        tokens=tokens,
        top_logprobs=[None if p is None else _by_text(p) for p in positions],
    )


def _by_text(position: LogprobsAtPosition) -> dict[str, float]:
    """The token itself comes first, then the most likely ones; of several with the same text the first counts."""
    found: dict[str, float] = {}
    for logprob in position.values():
        found.setdefault(_text(logprob), _value(logprob))
    return found


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsAtPosition], num_top: int, tokenizer: Tokenizer
) -> list[ChatCompletionTokenLogprob]:
    """Those of `/v1/chat/completions`: per token an object that holds the `num_top` most likely ones."""
    return [
        ChatCompletionTokenLogprob(
            **_with_bytes(token, position[token], tokenizer),
            top_logprobs=[
                TopLogprob(**_with_bytes(other, position[other], tokenizer))
                for other in sorted(position, key=lambda each: position[each].rank)[:num_top]
            ],
        )
        for token, position in zip(token_ids, positions, strict=True)
    ]


def prompt_logprobs(positions: Sequence[LogprobsAtPosition | None]) -> list[dict[str, dict[str, Any]] | None]:
    """Those of a prompt as vLLM gives them: by token id, with rank and text."""
    return [None if position is None else _described(position) for position in positions]


def _described(position: LogprobsAtPosition) -> dict[str, dict[str, Any]]:
    return {
        str(token): {"logprob": _value(found), "rank": found.rank, "decoded_token": found.decoded_token}
        for token, found in position.items()
    }


def _with_bytes(token: int, found: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _text(found)
    return {"token": text, "bytes": token_bytes(token, text, tokenizer), "logprob": _value(found)}


def _text(found: Logprob) -> str:
    assert found.decoded_token is not None, "requests over HTTP are detokenised"
    return found.decoded_token


def _value(found: Logprob) -> float:
    return max(found.logprob, _LOWEST)
