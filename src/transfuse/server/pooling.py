"""From a request's texts to what a pooling model makes of them, for the routes of all APIs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from starlette.requests import Request

from transfuse.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from transfuse.server.admission import Admission
from transfuse.server.generation import Service
from transfuse.server.observe import RequestRecord
from transfuse.server.streams import unless_gone

# As OpenAI has it for embeddings.
MAX_TEXTS: Final = 2048

Pooled = TypeVar("Pooled", EmbeddingRequestOutput, ScoringRequestOutput)


async def run_texts(
    service: Service,
    request: Request,
    num_texts: int,
    work: Callable[[int], Coroutine[Any, Any, list[Pooled]]],
) -> list[Pooled]:
    """What becomes of a request's texts; they are given up when its client leaves.

    A request has a place for each of its texts, but no more than the engine computes at once: it sends the others on
    as these end.

    Args:
        service: what to work with.
        request: the HTTP request.
        num_texts: how many there are.
        work: has them computed, so many at once as it is told.

    Raises:
        RequestError: a text can never be served.
        EngineError: the engine failed, is gone, or has no place.
        ClientDisconnect: the client has left.
    """
    admission: Admission = request.app.state.admission
    record: RequestRecord = request.state.record
    at_once = min(num_texts, service.settings.max_num_seqs)
    with admission.admit(at_once):
        record.streamed = False
        outputs = await unless_gone(request, work(at_once))
    record.add_texts(outputs)
    return outputs


def num_tokens(outputs: Sequence[Pooled]) -> int:
    """Tokens of all texts that were read, each as often as it was needed."""
    return sum(len(output.prompt_token_ids) for output in outputs)
