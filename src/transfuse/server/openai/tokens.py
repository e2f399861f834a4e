"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from transfuse.errors import PromptError
from transfuse.server.errors import FieldError
from transfuse.server.generation import Service
from transfuse.server.openai.messages import as_template_data
from transfuse.server.openai.requests import DetokenizeRequest, TokenizeRequest


class TokenizeResponse(BaseModel):
    """The tokens of a text.

    Attributes:
        count: how many there are.
        max_model_len: most tokens of a request, prompt and output together.
        tokens: their ids.
        token_strs: their spelling in the vocabulary; null unless asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str


async def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a prompt, or of messages as the chat template lays them out.

    Raises:
        RequestError: neither or both are given, or they cannot be tokenised.
    """
    service.served_name(body.model)
    text, add_special_tokens = await _text(service, body)
    if body.add_special_tokens is not None:
        add_special_tokens = body.add_special_tokens
    llm = service.llm
    tokens = await llm.encode(text, add_special_tokens)
    spelt = None
    if body.return_token_strs:
        backend = llm.tokenizer.backend
        assert backend is not None, "the front runs only tokenizers of the library"
        spelt = [backend.id_to_token(token) or "" for token in tokens]
    return TokenizeResponse(count=len(tokens), max_model_len=llm.limits.max_model_len, tokens=tokens, token_strs=spelt)


async def _text(service: Service, body: TokenizeRequest) -> tuple[str, bool]:
    """The text, and whether the tokenizer adds its own special tokens by default."""
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "Give prompt or messages, one of the two.")
    if body.prompt is not None:
        return body.prompt, True
    assert body.messages is not None
    arguments = body.layout_arguments(service.settings)
    return await service.llm.render_chat(as_template_data(body.messages), **arguments), False


async def detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens, special ones included.

    Raises:
        RequestError: an id is outside the vocabulary.
    """
    service.served_name(body.model)
    size = service.llm.limits.vocab_size
    for index, token in enumerate(body.tokens):
        if token >= size:
            raise PromptError(f"token {index} is {token}; expected an id from 0 to {size - 1}.")
    text = await asyncio.to_thread(service.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
