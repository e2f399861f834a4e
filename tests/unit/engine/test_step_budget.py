from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.engine.step_budget import ALIGNMENT, FIRST_BUDGET, StepBudget

Pattern = Callable[[int, random.Random], int]


class Machine:
    """Takes `fixed + per_token * T` seconds a step, give or take noise, and now and then far longer."""

    def __init__(
        self, *, fixed: float, per_token: float, noise: float = 0.1, pauses: float = 0.0, seed: int = 0
    ) -> None:
        self.fixed, self.per_token, self.noise, self.pauses = fixed, per_token, noise, pauses
        self.random = random.Random(seed)

    def seconds(self, num_tokens: int) -> float:
        factor = max(0.3, self.random.gauss(1.0, self.noise))
        if self.random.random() < self.pauses:
            factor *= 8
        return (self.fixed + self.per_token * num_tokens) * factor

    def ideal(self, target: float = 0.5) -> float:
        return (target - self.fixed) / self.per_token

    def run(self, budget: StepBudget, num_steps: int, pattern: Pattern = lambda value, _: value) -> list[int]:
        values = []
        for _ in range(num_steps):
            num_tokens = pattern(budget.value, self.random)
            budget.observe(num_tokens, self.seconds(num_tokens))
            values.append(budget.value)
        return values


def mostly_decodes(value: int, rng: random.Random) -> int:
    return value if rng.random() < 0.3 else rng.randint(1, 32)


def decodes(_: int, rng: random.Random) -> int:
    return rng.randint(1, 16)


COSTS = [(0.05, 0.001), (0.2, 0.001), (0.01, 0.0003), (0.0, 0.002), (0.1, 0.0005)]


@pytest.mark.parametrize(("fixed", "per_token"), COSTS)
@pytest.mark.parametrize("pattern", [lambda value, _: value, mostly_decodes], ids=["prefill", "mixed"])
@pytest.mark.parametrize("seed", range(4))
def test_it_converges_to_the_time_limit(fixed: float, per_token: float, pattern: Pattern, seed: int) -> None:
    machine = Machine(fixed=fixed, per_token=per_token, seed=seed)
    budget = StepBudget(4096, 16)
    machine.run(budget, 80, pattern)
    for value in machine.run(budget, 80, pattern):
        assert 0.5 * machine.ideal() < value < 1.5 * machine.ideal()


def test_without_noise_it_is_exact() -> None:
    machine = Machine(fixed=0.2, per_token=0.001, noise=0.0)
    budget = StepBudget(2048, 64)
    machine.run(budget, 40)
    assert machine.ideal() - ALIGNMENT <= budget.value <= machine.ideal() + 1


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_it_follows_a_change_of_speed(factor: float) -> None:
    machine = Machine(fixed=0.02, per_token=0.001)
    budget = StepBudget(4096, 16)
    machine.run(budget, 60)
    machine.fixed, machine.per_token = machine.fixed * factor, machine.per_token * factor
    values = machine.run(budget, 60)
    for value in values[20:]:
        assert 0.5 * machine.ideal() < value < 1.5 * machine.ideal()


@pytest.mark.parametrize("num_steps", [0, 10, 3000])
def test_decodes_do_not_change_it(num_steps: int) -> None:
    """A step of few tokens is all fixed cost; prompts that come after it must not be cut into crumbs."""
    machine = Machine(fixed=0.05, per_token=0.001)
    budget = StepBudget(4096, 1)
    machine.run(budget, num_steps, decodes)
    assert budget.value == FIRST_BUDGET
    machine.run(budget, 60)
    learnt = budget.value
    machine.run(budget, num_steps, decodes)
    assert budget.value == learnt


def test_pauses_do_not_throw_it_off() -> None:
    machine = Machine(fixed=0.05, per_token=0.001, noise=0.15, pauses=0.03)
    budget = StepBudget(4096, 16)
    machine.run(budget, 60)
    values = sorted(machine.run(budget, 200))
    assert 0.6 * machine.ideal() < values[100] < 1.4 * machine.ideal()
    assert values[0] > 0.3 * machine.ideal()


def test_the_first_value_is_moderate() -> None:
    assert StepBudget(8192, 64).value == FIRST_BUDGET
    assert StepBudget(100, 64).value == 96
    assert StepBudget(8192, 600).value == 600


def test_a_hopelessly_slow_machine_gets_the_floor() -> None:
    budget = StepBudget(2048, 20)
    Machine(fixed=1.0, per_token=0.1).run(budget, 20, lambda value, _: max(value, 64))
    assert budget.value == 20


@given(
    floor=st.integers(1, 300),
    extra=st.integers(0, 3000),
    steps=st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 1e4)), max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_it_stays_within_its_limits_whatever_it_sees(floor: int, extra: int, steps: list[tuple[int, float]]) -> None:
    budget = StepBudget(floor + extra, floor)
    for num_tokens, seconds in steps:
        budget.observe(num_tokens, seconds)
        assert floor <= budget.value <= floor + extra
        assert budget.value == floor or budget.value % ALIGNMENT == 0
