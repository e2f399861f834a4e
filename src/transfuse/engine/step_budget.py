"""Finds out how many tokens a step may have to stay under a time limit on the machine at hand."""

from __future__ import annotations

FIRST_BUDGET = 512
ALIGNMENT = 16
# Smaller steps are mostly the fixed cost of a step, and say nothing of what a token more would cost.
SMALLEST_OBSERVED = 64
# How far one step moves the estimate: fast enough to follow a neighbour that comes or goes within a few steps.
WEIGHT = 0.3
# A step at twice the expected time may be a slower machine; beyond that it is a pause of something else.
LARGEST_SURPRISE = 2.0


class StepBudget:
    """Divides the time limit by the seconds that a token took in recent steps of some size.

    A step's fixed cost counts towards its tokens, so that after small steps the budget is too low. The next full step
    then shows that tokens are cheaper, and the budget rises to where a step just takes its time.

    Args:
        ceiling: most tokens.
        floor: fewest tokens; at most `ceiling`.
        target_seconds: time limit of a step.
    """

    def __init__(self, ceiling: int, floor: int, target_seconds: float = 0.5) -> None:
        assert 1 <= floor <= ceiling, f"floor {floor} and ceiling {ceiling} contradict each other"
        self._ceiling = ceiling
        self._floor = floor
        self._target = target_seconds
        self._per_token: float | None = None

    @property
    def value(self) -> int:
        """Most tokens that the next step should have."""
        budget = FIRST_BUDGET if self._per_token is None else int(min(self._target / self._per_token, self._ceiling))
        aligned = min(budget, self._ceiling) // ALIGNMENT * ALIGNMENT
        return max(self._floor, aligned)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes in one step's size and duration."""
        if num_tokens < SMALLEST_OBSERVED:
            return
        found = max(seconds, 1e-9) / num_tokens
        if self._per_token is None:
            self._per_token = found
        else:
            self._per_token += WEIGHT * (min(found, LARGEST_SURPRISE * self._per_token) - self._per_token)
