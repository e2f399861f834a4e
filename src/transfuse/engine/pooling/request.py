"""One text on its way through a pooling model."""

from __future__ import annotations

from dataclasses import dataclass

from transfuse.errors import TransfuseError


@dataclass(slots=True, eq=False, kw_only=True)
class PoolingRequest:
    """A text, or two that are read together.

    Attributes:
        request_id: unique among unfinished requests.
        token_ids: not empty.
        type_ids: for each token, which of the texts it is of.
        num_skipped: leading tokens that are computed and do not count in the pooling.
        dimensions: numbers that its vector is cut to; None for all.
        priority: lower is served first under the `priority` policy.
        arrival_time: seconds of the monotonic clock.
        first_scheduled_time: when it first entered a step.
        finished_time: when it ended.
        error: what ended it; None where it has a result, or none yet.
    """

    request_id: str
    token_ids: list[int]
    type_ids: list[int]
    num_skipped: int = 0
    dimensions: int | None = None
    priority: int = 0
    arrival_time: float
    first_scheduled_time: float | None = None
    finished_time: float | None = None
    error: TransfuseError | None = None
