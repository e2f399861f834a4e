"""`/rerank` and `/score`, as vLLM, Jina and Cohere have them: how well documents answer a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Field

from transfuse.outputs import ScoringRequestOutput
from transfuse.server.bodies import MAX_ID, ApiModel, refused
from transfuse.server.errors import ErrorBody, request_id_of
from transfuse.server.generation import Service
from transfuse.server.pooling import MAX_TEXTS, num_tokens, run_texts
from transfuse.server.strict_json import StrictRoute

_RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
_SCORE_PATHS: Final = ("/score", "/v1/score")
_WHOLE: Final = "documents are read whole; cut them with truncate_prompt_tokens"
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"model": ErrorBody, "description": "What was wrong, where, the limit, and what to do."}
}


def _texts(value: object) -> object:
    """Documents may be objects with a `text`."""
    if not isinstance(value, list):
        return value
    return [one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in value]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
OneOrMore = Annotated[Texts, BeforeValidator(_listed, json_schema_input_type=str | list[str])]


class _Fields(ApiModel):
    """What both routes read.

    `user` describes a request without changing its answer; it is taken and not used.

    Attributes:
        truncate_prompt_tokens: tokens that are kept of what the model reads at once, -1 for as many as it takes.
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_ID)] | None = None
    priority: Annotated[int, Field(ge=-MAX_ID, le=MAX_ID)] | None = None
    user: str | None = None


class RerankRequest(_Fields):
    """The body of `/rerank`.

    Attributes:
        query: what is asked.
        documents: what may answer it: texts, or objects with a `text`.
        top_n: how many of them are reported, the best ones; all, if left out or 0.
        return_documents: whether the texts are sent back; they are by default.
    """

    query: str
    documents: Annotated[Texts, BeforeValidator(_texts, json_schema_input_type=list[str] | list[dict[str, str]])]
    top_n: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    return_documents: bool | None = None
    rank_fields: Annotated[None, refused("documents have one field, text")] = None
    max_chunks_per_doc: Annotated[None, refused(_WHOLE)] = None
    max_tokens_per_doc: Annotated[None, refused(_WHOLE)] = None


class ScoreRequest(_Fields):
    """The body of `/score`.

    Attributes:
        text_1: what is asked: one text for all of `text_2`, or one for each.
        text_2: what may answer it.
    """

    text_1: OneOrMore
    text_2: OneOrMore


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Document(BaseModel):
    """A text that was ranked."""

    text: str


class RerankResult(BaseModel):
    """One document's place.

    Attributes:
        index: which of the request's documents.
        document: its text; null where it was not to be sent back.
        relevance_score: the higher, the better it answers.
    """

    index: int
    document: Document | None
    relevance_score: float


class RerankResponse(BaseModel):
    """Documents, the best first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


class Score(BaseModel):
    """How well one pair of texts goes together."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(BaseModel):
    """Scores, in the order of the request."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


def router(service: Service) -> APIRouter:
    """The routes; the app must carry what `transfuse.server.openai.router` says.

    Args:
        service: what to work with.
    """
    routes = APIRouter(route_class=StrictRoute, responses=_ERRORS, tags=["Scores"])

    async def rerank(body: RerankRequest, request: Request) -> RerankResponse:
        """Rank documents by how well they answer a query."""
        model = service.pooling_name(body.model, "score")
        outputs = await _scores(service, request, [body.query], body.documents, body)
        ranked = sorted(enumerate(outputs), key=lambda pair: -pair[1].outputs.score)
        shown = body.return_documents is not False
        results = [
            RerankResult(
                index=index,
                document=Document(text=body.documents[index]) if shown else None,
                relevance_score=output.outputs.score,
            )
            for index, output in ranked[: body.top_n or None]
        ]
        return RerankResponse(
            id=f"rerank-{request_id_of(request)}", model=model, usage=_usage(outputs), results=results
        )

    async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
        """Score pairs of texts."""
        model = service.pooling_name(body.model, "score")
        outputs = await _scores(service, request, body.text_1, body.text_2, body)
        return ScoreResponse(
            id=f"score-{request_id_of(request)}",
            created=int(time.time()),
            model=model,
            data=[Score(index=index, score=output.outputs.score) for index, output in enumerate(outputs)],
            usage=_usage(outputs),
        )

    for path in _RERANK_PATHS:
        routes.post(path)(rerank)
    for path in _SCORE_PATHS:
        routes.post(path)(score)
    return routes


async def _scores(
    service: Service, request: Request, queries: Sequence[str], documents: Sequence[str], body: _Fields
) -> list[ScoringRequestOutput]:
    async def work(at_once: int) -> list[ScoringRequestOutput]:
        return await service.llm.score(
            queries,
            documents,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            priority=body.priority or 0,
            at_once=at_once,
        )

    return await run_texts(service, request, len(documents), work)


def _usage(outputs: Sequence[ScoringRequestOutput]) -> Usage:
    count = num_tokens(outputs)
    return Usage(prompt_tokens=count, total_tokens=count)
