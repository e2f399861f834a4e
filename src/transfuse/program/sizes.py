"""Numbers of a program that depend on the step: sums of multiples of its tokens, logit rows, requests and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# T tokens, S rows of logits, R requests, B blocks in a row of the block table.
SYMBOLS = ("T", "S", "R", "B")


@dataclass(frozen=True, slots=True)
class StepSize:
    """How large one step is.

    Attributes:
        num_tokens: T.
        num_logit_rows: S.
        num_requests: R.
        num_blocks: B.
    """

    num_tokens: int
    num_logit_rows: int
    num_requests: int
    num_blocks: int

    @property
    def values(self) -> tuple[int, int, int, int, int]:
        """What the factors of a `Size` are multiplied with."""
        return 1, self.num_tokens, self.num_logit_rows, self.num_requests, self.num_blocks


@dataclass(frozen=True, slots=True)
class Size:
    """`constant + t * T + s * S + r * R + b * B`.

    Attributes:
        factors: those five numbers.
    """

    factors: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, number: int) -> Size:
        """A number that is the same in every step."""
        return cls((number, 0, 0, 0, 0))

    @property
    def is_constant(self) -> bool:
        """Whether it is the same in every step."""
        return not any(self.factors[1:])

    @property
    def constant(self) -> int:
        """The number that is the same in every step."""
        assert self.is_constant, self
        return self.factors[0]

    def is_number(self, number: int) -> bool:
        """Whether it is this number in every step."""
        return self.is_constant and self.factors[0] == number

    def at(self, step: StepSize) -> int:
        """The number in one step."""
        return sum(factor * value for factor, value in zip(self.factors, step.values, strict=True))

    def __add__(self, other: Size) -> Size:
        a, b = self.factors, other.factors
        return Size((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4]))

    def times(self, other: Size) -> Size | None:
        """The product, where one of the two is constant."""
        if other.is_constant:
            number, factors = other.constant, self.factors
        elif self.is_constant:
            number, factors = self.constant, other.factors
        else:
            return None
        return Size(
            (factors[0] * number, factors[1] * number, factors[2] * number, factors[3] * number, factors[4] * number)
        )

    def minus(self, other: Size) -> Size:
        """The difference."""
        return self + Size(
            (-other.factors[0], -other.factors[1], -other.factors[2], -other.factors[3], -other.factors[4])
        )

    @property
    def least(self) -> float:
        """The least that it can be, where each symbol is at least one."""
        return self.factors[0] + sum(f if f >= 0 else float("-inf") for f in self.factors[1:])

    def __str__(self) -> str:
        terms = [
            f"{factor}*{name}" if factor != 1 else name
            for factor, name in zip(self.factors[1:], SYMBOLS, strict=True)
            if factor
        ]
        constant = [str(self.factors[0])] if self.factors[0] or not terms else []
        return "+".join(terms + constant)


ONE, ZERO = Size.of(1), Size.of(0)


def fit(values: Sequence[int], steps: Sequence[StepSize]) -> Size | None:
    """The size that a number has in every step, seen in a few of them; None where none of the forms looked for fits.

    Looked for are constants, multiples of one symbol, and one symbol times a factor plus a constant. The steps' own
    sizes are different primes, three or more that do not lie on a line, so that a number that fits by chance would have
    to be made of them.
    """
    first, *others = values
    if all(value == first for value in others):
        return Size.of(first)
    for with_constant in (False, True):
        for symbol in range(1, len(SYMBOLS) + 1):
            at = [step.values[symbol] for step in steps]
            if at[1] == at[0]:
                continue  # A model without attention has no blocks.
            factor, rest = divmod(values[1] - first, at[1] - at[0])
            constant = first - factor * at[0]
            fits = rest == 0 and all(v == factor * a + constant for v, a in zip(values, at, strict=True))
            if fits and bool(constant) == with_constant:
                factors = [constant, 0, 0, 0, 0]
                factors[symbol] = factor
                return Size((factors[0], factors[1], factors[2], factors[3], factors[4]))
    return None
