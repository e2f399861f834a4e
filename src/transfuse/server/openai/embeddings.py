"""`/v1/embeddings`: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from openai.types import CreateEmbeddingResponse, Embedding
from openai.types.create_embedding_response import Usage
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from transfuse.front.prompts import Prompt
from transfuse.outputs import EmbeddingRequestOutput
from transfuse.server.bodies import MAX_ID, ApiModel, NumTokens, ShortText
from transfuse.server.generation import Service
from transfuse.server.openai.fields import TokenId
from transfuse.server.openai.prompts import TextOrIds, prompt_list
from transfuse.server.pooling import MAX_TEXTS, num_tokens, run_texts

# Vectors that are written before others have their turn: some milliseconds.
_WRITTEN_AT_ONCE: Final = 32

Truncation = Annotated[int, Field(ge=-1, le=MAX_ID)]


class EmbeddingRequest(ApiModel):
    """The body of `/v1/embeddings`.

    `user` describes a request without changing its answer; it is taken and not used.

    Attributes:
        input: a text or its token ids, or a list of such.
        encoding_format: `float`, or `base64` for float32 numbers, least significant byte first.
        dimensions: numbers that vectors are cut to, where the model's config declares that they may be.
        truncate_prompt_tokens: tokens that are kept of a longer text, -1 for as many as the model takes.
        prompt_name: one of the model's own prompts, put before each text.
    """

    input: Annotated[
        list[TextOrIds],
        PlainValidator(
            prompt_list(MAX_TEXTS), json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]]
        ),
    ]
    model: Annotated[str, Field(max_length=1024)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: NumTokens | None = None
    truncate_prompt_tokens: Truncation | None = None
    prompt_name: ShortText | None = None
    priority: Annotated[int, Field(ge=-MAX_ID, le=MAX_ID)] | None = None
    user: str | None = None


async def create_embeddings(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    """The answer to a request for vectors.

    Raises:
        RequestError: a text can never be served, or the model makes no vectors.
        EngineError: the engine failed, is gone, or has no place.
    """
    model = service.pooling_name(body.model, "embed")
    prompts: list[Prompt] = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in body.input]

    async def work(at_once: int) -> list[EmbeddingRequestOutput]:
        return await service.llm.embed(
            prompts,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            priority=body.priority or 0,
            at_once=at_once,
        )

    outputs = await run_texts(service, request, len(prompts), work)
    text = await _written(outputs, model, as_base64=body.encoding_format == "base64")
    return Response(text, media_type="application/json")


async def _written(outputs: Sequence[EmbeddingRequestOutput], model: str, *, as_base64: bool) -> str:
    """A `CreateEmbeddingResponse` as JSON, made piece by piece: thousands of vectors take a second to write."""
    count = num_tokens(outputs)
    usage = Usage(prompt_tokens=count, total_tokens=count)
    head = CreateEmbeddingResponse(object="list", data=[], model=model, usage=usage).model_dump(exclude={"data"})
    items = []
    for index, output in enumerate(outputs):
        if index % _WRITTEN_AT_ONCE == _WRITTEN_AT_ONCE - 1:
            await asyncio.sleep(0)
        vector: Any = output.outputs.embedding if not as_base64 else base64.b64encode(output.outputs.data).decode()
        item = Embedding.model_construct(object="embedding", index=index, embedding=vector)
        items.append(json.dumps(item.__dict__, separators=(",", ":")))
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},"data":[{",".join(items)}]}}'
