"""Finds out how many tokens a step may have to stay under a time limit on the machine at hand."""

from __future__ import annotations

FIRST_BUDGET = 512
ALIGNMENT = 16
# The share of the time limit that is aimed at: about half of all steps take longer than expected.
HEADROOM = 0.9
# The share of the first step's time that is taken for its fixed cost. With none, all that is learnt while the value
# shrinks would be put down to slower tokens, and it would shrink far too much before it recovers.
FIRST_FIXED_SHARE = 0.3
# Relative sizes: error of a single step's time; change, per step, of the machine's speed and of each cost on its own.
NOISE = 0.15
SPEED_DRIFT = 0.05
COST_DRIFT = 0.01
# A step at twice the expected time may be a slower machine; beyond that it is a pause of something else.
LARGEST_SURPRISE = 1.0


class StepBudget:
    """Tracks `seconds = fixed + per_token * tokens` with a Kalman filter and solves it for the time limit.

    The two costs drift as a random walk, mostly together, so that old steps fade. Where all steps are alike (decoding
    goes on for minutes), only their sum is seen, and the filter keeps what it knew about the split. Far from the steps
    seen it is not believed: the value is at most twice the largest of them, or the first value.

    Args:
        ceiling: most tokens.
        floor: fewest tokens; at most `ceiling`.
        target_seconds: time limit of a step.
    """

    def __init__(self, ceiling: int, floor: int, target_seconds: float = 0.5) -> None:
        assert 1 <= floor <= ceiling, f"floor {floor} and ceiling {ceiling} contradict each other"
        self._ceiling = ceiling
        self._floor = floor
        self._target = HEADROOM * target_seconds
        self._largest = FIRST_BUDGET // 2
        self._fixed = 0.0
        self._per_token = 0.0  # 0 until something was observed
        # Covariance of the two: fixed x fixed, fixed x per_token, per_token x per_token.
        self._var_fixed = self._covar = self._var_per_token = 0.0

    @property
    def value(self) -> int:
        """Most tokens that the next step should have."""
        trusted = 2 * self._largest
        if self._per_token > 0.0:
            trusted = min(trusted, int((self._target - self._fixed) / self._per_token))
        budget = min(self._ceiling, trusted)
        if budget <= self._floor:
            return self._floor
        return max(self._floor, budget // ALIGNMENT * ALIGNMENT)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes in one step's size and duration."""
        assert num_tokens >= 1 and seconds > 0.0, f"{num_tokens} tokens in {seconds} s"
        self._largest = max(self._largest, num_tokens)
        if self._per_token == 0.0:
            self._fixed = FIRST_FIXED_SHARE * seconds
            self._per_token = (seconds - self._fixed) / num_tokens
            self._var_fixed = (seconds / 2) ** 2
            self._var_per_token = self._per_token**2
            return
        self._drift(num_tokens)
        self._correct(num_tokens, seconds)

    def _drift(self, num_tokens: int) -> None:
        """Lets what is known grow older, up to knowing only the order of magnitude."""
        fixed, per_token = self._fixed, self._per_token
        expected = fixed + per_token * num_tokens
        self._var_fixed += (SPEED_DRIFT * fixed) ** 2 + (COST_DRIFT * max(fixed, 0.1 * expected)) ** 2
        self._covar += SPEED_DRIFT**2 * fixed * per_token
        self._var_per_token += (SPEED_DRIFT**2 + COST_DRIFT**2) * per_token**2
        excess = max(self._var_fixed / expected**2, self._var_per_token / per_token**2)
        if excess > 1.0:
            self._var_fixed, self._covar, self._var_per_token = (
                v / excess for v in (self._var_fixed, self._covar, self._var_per_token)
            )

    def _correct(self, num_tokens: int, seconds: float) -> None:
        expected = self._fixed + self._per_token * num_tokens
        surprise = min(seconds - expected, LARGEST_SURPRISE * expected)
        # How the error of each cost goes along with the error of the expected time.
        with_fixed = self._var_fixed + self._covar * num_tokens
        with_per_token = self._covar + self._var_per_token * num_tokens
        variance = with_fixed + with_per_token * num_tokens + (NOISE * expected) ** 2
        self._fixed += with_fixed / variance * surprise
        self._per_token += with_per_token / variance * surprise
        self._var_fixed -= with_fixed**2 / variance
        self._var_per_token -= with_per_token**2 / variance
        self._covar -= with_fixed * with_per_token / variance
        # Neither cost is negative, and tokens are never free.
        self._fixed = max(0.0, self._fixed)
        self._per_token = max(self._per_token, 1e-3 * seconds / num_tokens)
