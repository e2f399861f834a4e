"""Tests that turn out alike for every object are folded; all others stay."""

from __future__ import annotations

import ast

import pytest

from transfuse.rewrite.fold import Found, Plain, fold

VALUES: dict[tuple[str, ...], Plain | Found] = {
    ("kind",): "full",
    ("limit",): 7.0,
    ("v_proj",): Found.PRESENT,
    ("q_norm",): None,
    ("use_bias",): True,
    ("use_gate",): False,
    ("num_experts",): 4,
    ("num_shared",): 0,
    ("attention", "sinks"): None,
    ("missing",): Found.ABSENT,
    ("training",): False,
}


def folded(body: str, arguments: str = "self, x, mask=None") -> str:
    tree = ast.parse(f"def forward({arguments}):\n" + "\n".join(f"    {line}" for line in body.splitlines())).body[0]
    assert isinstance(tree, ast.FunctionDef)
    before = ast.dump(tree)
    new = fold(tree, lambda path: VALUES.get(path, Found.UNKNOWN))
    assert ast.dump(tree) == before
    return "\n".join(line.removeprefix("    ") for line in ast.unparse(new).splitlines()[1:])


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("self.v_proj is not None", True),
        ("self.v_proj is None", False),
        ("self.v_proj is True", False),
        ("self.q_norm is None", True),
        ("self.q_norm", False),
        ("self.use_bias", True),
        ("self.use_bias is True", True),
        ("self.use_gate", False),
        ("self.num_experts", True),
        ("self.num_experts is True", False),
        ("self.num_shared", False),
        ("self.attention.sinks is not None", False),
        ("not self.use_bias", False),
        ("self.use_bias and self.v_proj is not None", True),
        ("self.use_gate and x.any()", False),
        ("self.use_bias or x.any()", True),
        ("self.use_gate or self.q_norm is not None", False),
        ("not (self.use_gate or self.num_experts)", False),
        ("self.num_experts > 2", True),
        ("self.num_experts <= 2", False),
        ("4 == self.num_experts", True),
        ("0 < self.num_experts < 4", False),
        ("self.num_shared > -1", True),
        ("self.num_experts > self.num_shared", True),
        ("self.limit >= 6.5", True),
        ("self.limit", True),
        ("self.kind == 'full'", True),
        ("self.kind != 'full'", False),
        ("self.kind in ('full', 'sliding')", True),
        ("self.kind not in ['sliding', None]", True),
        ("self.kind is not None", True),
        ("self.kind is True", False),
        ("self.q_norm == None", True),
        ("self.q_norm is not None and self.num_experts > 2", False),
        ("self.use_gate or self.kind == 'full'", True),
        ("hasattr(self, 'v_proj')", True),
        ("hasattr(self, 'q_norm')", True),
        ("hasattr(self, 'missing')", False),
        ("hasattr(self.attention, 'sinks')", True),
    ],
)
def test_what_is_known_is_folded(test: str, outcome: bool) -> None:
    assert folded(f"return a(x) if {test} else b(x)") == ("return a(x)" if outcome else "return b(x)")
    assert folded(f"if {test}:\n    return a(x)\nelse:\n    return b(x)") == f"return {'a' if outcome else 'b'}(x)"


@pytest.mark.parametrize(
    "test",
    [
        "mask is not None",
        "x.shape[0] > 4",
        "self.unknown",
        "self.unknown is None",
        "self.v_proj",
        "self.missing is None",
        "self.training",
        "not self.training",
        "self.num_experts > limit",
        "self.num_experts > self.unknown",
        "self.num_experts > 'a'",
        "self.v_proj > 2",
        "self.kind == kind",
        "self.kind == x.kind",
        "self.kind is 'full'",
        "self.kind in kinds",
        "self.kind in ('full', kind)",
        "self.kind in ('full', ('swa',))",
        "self.kind == b'full'",
        "self.missing == 2",
        "self.num_experts == f(4)",
        "0 < self.num_experts < limit",
        "-self.kind == 2",
        "self.num_experts is 4",
        "other.v_proj is None",
        "self.v_proj.weight is None",
        "self.modules[0] is None",
        "self.v_proj() is None",
        "self.use_bias is not None is not x",
        "self.use_bias and mask is not None",
        "x.any() and self.use_gate",
        "(v := self.v_proj) is None",
        "(use := self.use_bias)",
        "self.use_bias and (y := mask)",
        "hasattr(self, name)",
        "hasattr(x, 'v_proj')",
        "hasattr(self, 'unknown')",
        "isinstance(self.q_norm, Norm)",
    ],
)
def test_what_may_differ_stays(test: str) -> None:
    expression = ast.unparse(ast.parse(f"return_ = a(x) if {test} else b(x)"))
    assert folded(expression) == expression
    statement = ast.unparse(ast.parse(f"if {test}:\n    y = a(x)\nelse:\n    y = b(x)"))
    assert folded(statement) == statement


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if self.use_gate:\n    x = a(x)", "pass"),
        ("if self.use_gate:\n    x = a(x)\nreturn x", "return x"),
        ("if self.use_bias:\n    x = a(x)\n    x = b(x)\nreturn x", "x = a(x)\nx = b(x)\nreturn x"),
        ("if mask:\n    if self.use_gate:\n        x = a(x)", "if mask:\n    pass"),
        ("if mask:\n    x = a(x)\nelif self.use_gate:\n    x = b(x)", "if mask:\n    x = a(x)"),
        (
            "if mask:\n    x = a(x)\nelif self.use_bias:\n    x = b(x)\nelse:\n    x = c(x)",
            "if mask:\n    x = a(x)\nelse:\n    x = b(x)",
        ),
        ("if self.use_gate:\n    x = a(x)\nelif mask:\n    x = b(x)", "if mask:\n    x = b(x)"),
        ("for i in x:\n    if self.use_gate:\n        a(i)", "for i in x:\n    pass"),
        ("with a():\n    if self.use_gate:\n        b(x)", "with a():\n    pass"),
        (
            "try:\n    if self.use_gate:\n        a(x)\nfinally:\n    if self.use_gate:\n        b(x)",
            "try:\n    pass\nfinally:\n    pass",
        ),
        ("if self.use_bias:\n    if self.q_norm is None:\n        x = a(x)", "x = a(x)"),
        ("x = a(b(x) if self.use_bias else x, c if self.use_gate else mask)", "x = a(b(x), mask)"),
        ("x = [a(i) if self.use_bias else i for i in x]", "x = [a(i) for i in x]"),
    ],
)
def test_what_is_left_stands_in_its_place(before: str, after: str) -> None:
    assert folded(before) == after


@pytest.mark.parametrize(
    "body",
    [
        "self.use_bias = x\nreturn a(x) if self.use_bias else b(x)",
        "del self.use_bias\nreturn a(x) if self.use_bias else b(x)",
        "mask.use_bias += 1\nreturn a(x) if self.use_bias else b(x)",
        "setattr(self, 'use_bias', x)\nreturn a(x) if self.use_bias else b(x)",
        "self.__dict__.update(x)\nreturn a(x) if self.use_bias else b(x)",
        "vars(self).update(x)\nreturn a(x) if self.use_bias else b(x)",
        "self = x\nreturn a(x) if self.use_bias else b(x)",
        "y = [self.use_bias for self in x]\nreturn a(x) if self.use_bias else b(x)",
        "global y\nreturn a(x) if self.use_bias else b(x)",
    ],
)
def test_what_the_method_changes_itself_stays(body: str) -> None:
    assert folded(body) == body


def test_another_object_of_the_name_self() -> None:
    body = "return a(x) if self.use_bias else b(x)"
    assert folded(body, "x, self") == body
    nested = "return map(lambda self: a if self.use_bias else b, x)"
    assert folded(nested) == nested


def test_a_variable_does_not_turn_into_a_global_one() -> None:
    body = "if self.use_gate:\n    y = a(x)\nif mask:\n    return y\nreturn x"
    assert folded(body) == body
    assert folded(body.replace("return y", "return a")) == "if mask:\n    return a\nreturn x"
