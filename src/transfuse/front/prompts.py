"""Reads prompts and refuses, before any work, what can be known to be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfuse.errors import CapacityError, PromptError, RequestError, SamplingParamsError
from transfuse.messages import ModelLimits
from transfuse.sampling_params import SamplingParams
from transfuse.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, object]


class PromptReader:
    """Turns prompts into token ids and checks them; safe to call from any thread.

    Args:
        tokenizer: of the model.
        limits: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it has one, and its token ids.

        Raises:
            PromptError: it is neither text nor `{"prompt": text}` nor `{"prompt_token_ids": ids}`, it is empty, or
                an id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            return prompt, self._checked(self._tokenizer.encode(prompt))
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"], self._checked(self._tokenizer.encode(prompt["prompt"]))
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            return None, self._checked(prompt["prompt_token_ids"])
        given = f"keys {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else type(prompt).__name__
        raise PromptError(f'A prompt is text, {{"prompt": text}} or {{"prompt_token_ids": [ids]}}; got {given}.')

    def _checked(self, ids: object) -> list[int]:
        return check_ids(ids, self._limits.vocab_size)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what can be known to be wrong before any work.

        Raises:
            CapacityError: the prompt leaves no room for a token.
            RequestError: `params` is no `SamplingParams`.
            SamplingParamsError: an id is outside the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"The sampling parameters are a {type(params).__name__}; give a SamplingParams.")
        most = self._limits.max_model_len - 1
        if len(prompt_token_ids) > most:
            # Anthropic's words, down to the sign: Claude Code looks for them, and shortens the conversation.
            raise CapacityError(
                f"The prompt is too long: {len(prompt_token_ids)} tokens > {most}, which is what fits into "
                f"max_model_len={self._limits.max_model_len}, since an answer takes one or more. Shorten the prompt or "
                "raise max_model_len."
            )
        size = self._limits.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids or ()), ("logit_bias", params.logit_bias or {})):
            for token in ids:
                if token >= size:
                    raise SamplingParamsError(name, token, f"token ids below the vocabulary's {size}")


def check_ids(ids: object, vocab_size: int) -> list[int]:
    """Token ids of a prompt, if they are some.

    Raises:
        PromptError: they are none, or one is outside the vocabulary.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise PromptError(f"prompt_token_ids is a {type(ids).__name__}; expected a list of token ids.")
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            shown = token if not isinstance(token, int) or abs(token) < 10**30 else "a huge integer"
            raise PromptError(f"prompt token {index} is {shown!r}; expected an id from 0 to {vocab_size - 1}.")
    if not ids:
        raise PromptError("The prompt has no tokens; give at least one.")
    return list(ids)
