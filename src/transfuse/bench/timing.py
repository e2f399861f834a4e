"""When a request's tokens came, and the measures that this field takes from that.

TTFT: from sending to the first token. TPOT: the rest of the time, for each further token. ITL: each gap between chunks.
E2E: from sending to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from transfuse.bench.report import Measure
from transfuse.bench.stats import distribution
from transfuse.errors import ConfigError

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
# As they are written in a goal: those that a request has one of.
GOALS = ("ttft", "tpot", "e2e")


@dataclass(slots=True)
class Timing:
    """Of one request; times are seconds of one clock.

    Attributes:
        sent: when it left the client.
        chunks: when tokens came, one entry for each arrival, which may bring several.
        ended: when its answer was complete, or it failed.
        num_prompt_tokens: of the prompt.
        num_output_tokens: generated.
        num_cached_tokens: of the prompt, found in the prefix cache; None where the server does not tell.
        error: what kind of failure it was; None where it was none.
        detail: what the server said of it.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where there was one alone."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [after - before for before, after in pairwise(self.chunks)]


def latencies(timings: Sequence[Timing]) -> dict[str, Measure]:
    """Distributions of `LATENCIES` over requests that succeeded, in milliseconds."""
    tpots = [timing.tpot for timing in timings]
    values = {
        "ttft_ms": [timing.ttft for timing in timings],
        "tpot_ms": [tpot for tpot in tpots if tpot is not None],
        "itl_ms": [gap for timing in timings for gap in timing.gaps],
        "e2e_ms": [timing.e2e for timing in timings],
    }
    return {name: distribution(1e3 * value for value in values[name]) for name in LATENCIES}


def rates(timings: Sequence[Timing], seconds: float) -> dict[str, Measure]:
    """What was done in a second, over the whole of a run that took `seconds`."""
    num_output = sum(timing.num_output_tokens for timing in timings)
    num_prompt = sum(timing.num_prompt_tokens for timing in timings)
    return {
        "requests_per_s": len(timings) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
    }


def cached_share(timings: Sequence[Timing]) -> float | None:
    """Share of prompt tokens that came from a prefix cache; None where that is not known of every request."""
    counts = [timing.num_cached_tokens for timing in timings]
    known = [count for count in counts if count is not None]
    num_prompt = sum(timing.num_prompt_tokens for timing in timings)
    return sum(known) / num_prompt if len(known) == len(counts) and num_prompt else None


def duration(timings: Sequence[Timing]) -> float:
    """Seconds from the first request that was sent to the last that ended."""
    return max(timing.ended for timing in timings) - min(timing.sent for timing in timings)


def parse_goals(text: str) -> dict[str, float]:
    """Limits in milliseconds by name, from `ttft:500,tpot:50`.

    Raises:
        ConfigError: it is no such list.
    """
    goals: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = 0.0
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(
                f"--goodput has {part.strip()!r}; expected milliseconds for {', '.join(GOALS)}, as in ttft:500,tpot:50."
            )
    return goals


def num_within(timings: Sequence[Timing], goals: Mapping[str, float]) -> int:
    """How many requests kept every goal; one of a single token has no TPOT to be too long."""
    return sum(all(_milliseconds(timing, name) <= limit for name, limit in goals.items()) for timing in timings)


def _milliseconds(timing: Timing, name: str) -> float:
    value: float | None = {"ttft": timing.ttft, "tpot": timing.tpot, "e2e": timing.e2e}[name]
    return 0.0 if value is None else 1e3 * value
