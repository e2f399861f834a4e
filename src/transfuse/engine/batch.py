"""What one step computes: which tokens of which requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from transfuse.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's share of a step.

    Attributes:
        request: the request.
        start: position of the first token to compute.
        num_tokens: tokens to compute.
        samples: whether a token is sampled after the last of them.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def goes_on_by_one(self) -> bool:
        """Whether it continues a text by a single token."""
        return self.num_tokens == 1 and self.start > 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work.

    Attributes:
        entries: those with a single token first, then the longer ones.
        fresh_blocks: blocks handed out for this step, whose contents are arbitrary until zeroed.
        fresh_rows: rows of the state cache handed out for this step, likewise.
        preempted: requests whose blocks were taken away.
    """

    entries: tuple[ScheduledRequest, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    fresh_rows: tuple[int, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that belong to prompts."""
        ends = ((entry, len(entry.request.prompt_token_ids)) for entry in self.entries)
        return sum(max(0, min(entry.start + entry.num_tokens, end) - entry.start) for entry, end in ends)

    def in_two(self) -> list[Batch]:
        """Requests that go on by one token, in the order of their states' rows, and the others; without what is empty.

        What was handed out for the step is the first batch's, which therefore is to run first.
        """
        going_on = [entry for entry in self.entries if entry.goes_on_by_one]
        going_on.sort(key=lambda entry: entry.request.state_row or 0)
        others = [entry for entry in self.entries if not entry.goes_on_by_one]
        first, *rest = [tuple(entries) for entries in (going_on, others) if entries]
        return [replace(self, entries=first), *map(Batch, rest)]


@dataclass(slots=True)
class StepPlan:
    """A batch while it is put together.

    Attributes:
        budget: tokens that may still be planned.
        planned: by request id, an entry and the blocks handed out for it.
        preempted: requests whose blocks were taken away.
    """

    budget: int
    planned: dict[str, tuple[ScheduledRequest, list[int]]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)

    def drop(self, request: Request) -> None:
        """Takes back what was planned for a request."""
        if dropped := self.planned.pop(request.request_id, None):
            self.budget += dropped[0].num_tokens

    def batch(self) -> Batch:
        """The finished batch."""
        entries = [entry for entry, _ in self.planned.values()]
        return Batch(
            tuple(sorted(entries, key=lambda entry: entry.num_tokens > 1)),
            tuple(block for _, fresh in self.planned.values() for block in fresh),
            tuple(e.request.state_row for e in entries if e.start == 0 and e.request.state_row is not None),
            tuple(self.preempted),
        )
