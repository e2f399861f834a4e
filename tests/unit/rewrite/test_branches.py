"""Code that may take another path than the recorded one is told from code that cannot."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from transfuse.rewrite.branches import first_branch, is_straight, side_effect
from transfuse.rewrite.liveness import readers

SETTLED = (
    "return x + 1",
    "if self.bias is not None: x = x + self.bias",
    "y = x if self.scale > 1.0 else -x",
    "for i in range(3): x = x + i",
    "if isinstance(self.act, str): x = x * 2",
)
OPEN = (
    "if x.shape[1] > 5: x = x + 1",
    "y = x if flag else -x",
    "y = mask or x",
    "while n: n -= 1",
    "for row in x: y = row",
    "if self.training: x = x + 1",
    "y = [part for part in x]",
)


def parsed(code: str) -> list[ast.stmt]:
    return ast.parse(code).body


@pytest.mark.parametrize("code", SETTLED)
def test_conditions_on_settings_are_none(code: str) -> None:
    assert first_branch(parsed(code)) is None


@pytest.mark.parametrize("code", OPEN)
def test_conditions_on_what_is_given(code: str) -> None:
    assert first_branch(parsed(code)) is not None


@pytest.mark.parametrize(("code", "expected"), [("self.x = 1", True), ("y[0] = x", True), ("y = x[0]", False)])
def test_side_effects(code: str, expected: bool) -> None:
    assert (side_effect(parsed(code)) is not None) is expected


def helper(x: torch.Tensor) -> torch.Tensor:
    return -x if x.shape[0] > 3 else x


def calls_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x) + 1


def calls_itself(x: torch.Tensor) -> torch.Tensor:
    return calls_itself(x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (helper, False),
        (calls_helper, False),
        (calls_itself, True),
        (functional.silu, True),
        (eval("lambda x: x"), False),
    ],
)
def test_functions_with_those_that_they_call(function: Callable[..., Any], expected: bool) -> None:
    assert is_straight(function) is expected


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        ("return h", 1),
        ("h = 2\nreturn h", 0),
        ("h += 1\nreturn 3", 1),
        ("if a:\n    h = 2\nreturn h", 1),
        ("if a:\n    return h\nh = 2\nreturn h", 1),
        ("return 1\nuse(h)", 0),
    ],
)
def test_who_reads_a_variable(rest: str, count: int) -> None:
    code = "def f(a):\n    h = 1\n" + textwrap.indent(rest, "    ")
    tree = ast.parse(code).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert len(readers(tree, tree.body[0], "h")) == count
