"""What the program of each model type is made of, seen while the model is checked against its original."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.zoo.weights import build
from transfuse.engine import unseen
from transfuse.engine.fused_runner import FusedRunner
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.program.graph import TorchOp
from transfuse.program.native import NativeOp

# What csrc can run.
KERNELS = ("linear", "norm", "rotary_cache", "paged_attention", "gather_rows", "elementwise", "sum_products")


@dataclass(frozen=True)
class Program:
    """A program, or why there is none.

    Attributes:
        num_ops: kernels and operations of torch's, one after the other.
        kernels: that ran in steps.
        left: operations of torch's among its ops.
        reason: why there is none, or None.
    """

    num_ops: int = 0
    kernels: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    reason: str | None = None

    def __str__(self) -> str:
        """As in `program_types.txt`."""
        if self.reason is not None:
            return f"none: {self.reason}"
        return f"{self.num_ops} {','.join(sorted(self.kernels))} {','.join(sorted(self.left)) or '-'}"

    @classmethod
    def parse(cls, text: str) -> Program:
        """What `str` gave."""
        if text.startswith("none: "):
            return cls(reason=text.removeprefix("none: "))
        count, kernels, left = text.split()
        return cls(int(count), frozenset(kernels.split(",")), frozenset(() if left == "-" else left.split(",")))

    def has_lost(self, before: Program) -> bool:
        """Whether it computes less with kernels than an earlier one did, or takes more ops for it."""
        if before.reason is not None:
            return False
        if self.reason is not None:
            return True
        return self.num_ops > before.num_ops or not self.left <= before.left or not self.kernels >= before.kernels


@dataclass
class Watched:
    """The runner that was set up last, and how often each kernel had run by then."""

    runner: FusedRunner | None = None
    before: dict[str, int] = field(default_factory=dict)

    def program(self) -> Program:
        """Of that runner, with the kernels that have run since."""
        library, runner = load_kernels().library, self.runner
        assert runner is not None
        if library is None:
            return Program(reason=load_kernels().origin)
        if runner.executable is None:
            return Program(reason=runner.kernels.removeprefix("torch (").removesuffix(")").split(" in batches of")[0])
        ops = runner.executable._ops
        holds = {op.kernel for op in ops if isinstance(op, NativeOp)}
        ran = frozenset(name for name, count in self.before.items() if library.executions(name) > count)
        assert holds <= set(KERNELS), "one that is missing in KERNELS"
        assert holds == ran, f"of the program's kernels {sorted(holds)} only {sorted(ran)} ran"
        left = frozenset(op.name for op in ops if isinstance(op, TorchOp))
        return Program(len(ops), ran, left)


@contextmanager
def watched() -> Iterator[Watched]:
    """Within it, fused runners that are set up are noted."""
    seen = Watched()
    original = FusedRunner.allocate

    @functools.wraps(original)
    def allocate(self: FusedRunner, num_blocks: int, block_size: int) -> int:
        num_bytes = original(self, num_blocks, block_size)
        library = load_kernels().library
        if library is not None:
            seen.before = {name: library.executions(name) for name in KERNELS}
        seen.runner = self
        return num_bytes

    FusedRunner.allocate = allocate  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        FusedRunner.allocate = original  # type: ignore[method-assign]


def program_of(name: str) -> Program | None:
    """Of the tiny model of a type, which is checked against its original on a shrunk instance; None if it fails."""
    with watched() as seen:
        verdict = unseen._check(build(name), unseen._compare_fused)
        return seen.program() if verdict.passed else None
