"""Edits are made where they cannot change the meaning, and refused elsewhere."""

from __future__ import annotations

import ast
import linecache
from typing import Any

import pytest

from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.fold import Found, Known
from transfuse.rewrite.source import RewriteRefused, method_source, position_of
from transfuse.trace.graph import Position

_made = 0


def edits_of(body: str, arguments: str = "self, x, y=None", known: Known | None = None) -> Edits:
    """Edits of a method with this body."""
    global _made  # noqa: PLW0603
    _made += 1
    lines = [f"def forward({arguments}):", *("    " + line for line in body.strip("\n").splitlines())]
    file, text = f"<test {_made}>", "\n".join(lines) + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(text, file, "exec"), space)
    return Edits(method_source(space["forward"]), known)


def place(edits: Edits, text: str, index: int = 0) -> Position:
    """Where an expression stands that is written so."""
    wanted = ast.unparse(ast.parse(text, mode="eval"))
    found = [n for n in ast.walk(edits.source.tree) if isinstance(n, ast.expr) and ast.unparse(n) == wanted]
    positions = sorted(position for position in map(position_of, found) if position is not None)
    return positions[index]


def result(edits: Edits) -> list[str]:
    return [ast.unparse(statement) for statement in edits.apply().body]


def test_replace_keeps_what_fills_holes_and_edits_inside() -> None:
    edits = edits_of("return g(self.a(x) + 1)")
    call = edits.expression(place(edits, "self.a(x)"))
    edits.replace(place(edits, "g(self.a(x) + 1)"), "h(A, B, A_)", A=call, B=ast.Constant(2))
    edits.change_call(place(edits, "self.a(x)"), "op", "self.w", "None")
    assert result(edits) == ["return h(op(x, self.w, None), 2, A_)"]


def test_an_expression_that_takes_the_place_of_its_caller_is_edited_too() -> None:
    edits = edits_of("return act(self.a(x))")
    edits.replace(place(edits, "act(self.a(x))"), "INNER", INNER=edits.expression(place(edits, "self.a(x)")))
    edits.change_call(place(edits, "self.a(x)"), "op")
    assert result(edits) == ["return op(x)"]


def test_new_code_is_not_taken_for_the_originals() -> None:
    # The method starts in line 1: positions of what is parsed by itself would be found in it.
    edits = edits_of("return aaaaaaaa(x)")
    edits.replace(place(edits, "aaaaaaaa(x)"), "          bbbbbbbb(x, bbbbbbbb(y))".strip())
    assert result(edits) == ["return bbbbbbbb(x, bbbbbbbb(y))"]


def test_insert_and_fresh_names() -> None:
    edits = edits_of("out = 1\nif y:\n    return self.a(x)\nreturn out")
    name = edits.fresh("out")
    edits.insert_before(place(edits, "self.a(x)"), f"{name} = op(VALUE)", VALUE=edits.expression(place(edits, "x")))
    edits.replace(place(edits, "self.a(x)"), name)
    assert name == "out_2"
    assert result(edits)[1] == "if y:\n    out_2 = op(x)\n    return out_2"


def test_the_original_stays() -> None:
    edits = edits_of("return self.a(x)")
    before = ast.dump(edits.source.tree)
    edits.replace(place(edits, "self.a(x)"), "x")
    edits.apply()
    assert ast.dump(edits.source.tree) == before


def test_two_edits_of_one_place() -> None:
    edits = edits_of("return self.a(x)")
    edits.replace(place(edits, "self.a(x)"), "x")
    with pytest.raises(RewriteRefused, match="two edits meet at <test"):
        edits.change_call(place(edits, "self.a(x)"), "op")


def test_an_edit_inside_what_is_replaced() -> None:
    edits = edits_of("return act(self.a(x))")
    edits.replace(place(edits, "act(self.a(x))"), "op(x)")
    edits.change_call(place(edits, "self.a(x)"), "op")
    with pytest.raises(RewriteRefused, match="takes away or repeats"):
        edits.apply()


def test_an_edit_that_would_run_twice() -> None:
    edits = edits_of("return act(self.a(x))")
    inner = edits.expression(place(edits, "self.a(x)"))
    edits.replace(place(edits, "act(self.a(x))"), "A + A", A=inner)
    edits.change_call(place(edits, "self.a(x)"), "op")
    with pytest.raises(RewriteRefused, match="takes away or repeats"):
        edits.apply()


@pytest.mark.parametrize(
    "body",
    [
        "for i in range(3):\n    x = self.a(x)\nreturn x",
        "while self.a(x):\n    pass",
        "return [self.a(x) for _ in y]",
        "return map(lambda x: self.a(x), y)",
        "def inner(x):\n    return self.a(x)\nreturn inner(x)",
        "return {x: self.a(x) for _ in y}",
    ],
)
def test_what_may_run_several_times_is_left_alone(body: str) -> None:
    edits = edits_of(body)
    with pytest.raises(RewriteRefused):
        edits.replace(place(edits, "self.a(x)"), "x")


def test_what_a_loop_runs_over_is_evaluated_once() -> None:
    edits = edits_of("for i in self.a(x):\n    y = i\nelse:\n    y = self.b(x)\nreturn y")
    edits.replace(place(edits, "self.a(x)"), "op(x)")
    edits.replace(place(edits, "self.b(x)"), "op(x)")
    assert result(edits)[0] == "for i in op(x):\n    y = i\nelse:\n    y = op(x)"


@pytest.mark.parametrize(
    ("body", "certain"),
    [
        ("return self.a(x) + 1", True),
        ("return self.a(x) if y else 1", False),
        ("return 1 if y else self.a(x)", False),
        ("return 1 if self.a(x) else 2", True),
        ("return self.a(x) if self.a is not None else y", True),
        ("return y and self.a(x)", False),
        ("return self.a(x) or y", True),
        ("return 0 < y < self.a(x)", False),
        ("if self.a(x):\n    return 1", True),
        ("if y:\n    return 1\nelif self.a(x):\n    return 2", True),
    ],
)
def test_statements_go_where_the_expression_is_sure_to_be_evaluated(body: str, certain: bool) -> None:
    edits = edits_of(body)
    if certain:
        edits.insert_before(place(edits, "self.a(x)"), "new = 1")
        compile(ast.unparse(edits.apply()), "x", "exec")
    else:
        with pytest.raises(RewriteRefused, match="may not be evaluated"):
            edits.insert_before(place(edits, "self.a(x)"), "new = 1")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("q = self.a(x)\nk = self.b(x)", True),
        ("q = self.a(x)\nif y:\n    k = self.b(x)", True),
        ("q, k = self.a(x), self.b(x)", True),
        ("if y:\n    q = self.a(x)\nk = self.b(x)", False),
        ("if y:\n    q = self.a(x)\nelse:\n    k = self.b(x)", False),
        ("if self.a is not None:\n    q = self.a(x)\nk = self.b(x)", True),
        ("if self.a is not None and self.b is not None:\n    q = self.a(x)\nk = self.b(x)", True),
        ("if self.training:\n    q = self.a(x)\nk = self.b(x)", False),
        ("k = self.b(x)\nq = self.a(x)", False),
        ("q = self.a(x)\nwith y:\n    k = self.b(x)", False),
        ("with y:\n    q = self.a(x)\nk = self.b(x)", False),
        ("with y:\n    q = self.a(x)\n    k = self.b(x)", True),
        ("q = self.a(x)\ntry:\n    k = self.b(x)\nfinally:\n    pass", False),
        ("try:\n    q = self.a(x)\nexcept ValueError:\n    k = self.b(x)", False),
        ("q = self.a(x)\nfor _ in y:\n    k = self.b(x)", False),
    ],
)
def test_follows(body: str, expected: bool) -> None:
    edits = edits_of(body)
    assert edits.follows(place(edits, "self.a(x)"), place(edits, "self.b(x)")) is expected


@pytest.mark.parametrize(
    ("test", "expected"),
    [("self.use", True), ("self.other", False), ("y", False), ("self.use and y", False), ("self.changed", False)],
)
def test_a_branch_that_every_object_takes_is_no_branch(test: str, expected: bool) -> None:
    def known(path: tuple[str, ...]) -> bool | Found:
        return path in (("use",), ("changed",)) or Found.UNKNOWN

    edits = edits_of(f"self.changed = y\nif {test}:\n    x = self.a(x)\nreturn self.b(x)", known=known)
    assert edits.follows(place(edits, "self.a(x)"), place(edits, "self.b(x)")) is expected


def test_an_expression_in_the_part_of_a_condition_that_every_object_evaluates() -> None:
    edits = edits_of("return self.a(x) if self.use else x", known=lambda path: True)
    edits.insert_before(place(edits, "self.a(x)"), "z = 1")
    assert result(edits) == ["z = 1", "return self.a(x) if self.use else x"]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("y = 2", False),
        ("z = x", False),
        ("x.y = 2", False),
        ("x = 2", True),
        ("x += 2", True),
        ("x: int = 2", True),
        ("(x, z) = y", True),
        ("[z, *x] = y", True),
        ("for x in y:\n    pass", True),
        ("with y as x:\n    pass", True),
        ("try:\n    pass\nexcept ValueError as x:\n    pass", True),
        ("del x", True),
        ("z = (x := 3)", True),
        ("if y:\n    x = 3", True),
        ("import x", True),
        ("from y import z as x", True),
        ("def x(): pass", True),
        ("match y:\n    case [x]:\n        pass", True),
        ("match y:\n    case {'a': 1, **x}:\n        pass", True),
    ],
)
def test_rebound_between(between: str, expected: bool) -> None:
    edits = edits_of(f"q = self.a(x)\n{between}\nk = self.b(x)")
    assert edits.rebound_between("x", place(edits, "self.a(x)"), place(edits, "self.b(x)")) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = self.a(x)\nk = self.b(x)", True),
        ("q = self.a(x)\nx = self.b(x)", False),
        ("q = self.a(x) + (x := 1) + self.b(x)", True),
        ("q = self.a(x); x = 1; k = self.b(x)", True),
        ("q = self.a(x)\nif y:\n    x = 1\n    k = self.b(x)", True),
    ],
)
def test_rebound_by_the_statements_themselves(body: str, expected: bool) -> None:
    edits = edits_of(body)
    assert edits.rebound_between("x", place(edits, "self.a(x)"), place(edits, "self.b(x)")) is expected


def drop(body: str, text: str = "self.a(x)", *more: str) -> list[str]:
    edits = edits_of(body)
    for part in (text, *more):
        edits.drop_assignment(place(edits, part))
    edits.replace(place(edits, "act(a)"), "op(x)")
    return result(edits)


@pytest.mark.parametrize(
    "body",
    [
        "a = self.a(x)\nreturn act(a)",
        "a = self.a(x)\nb = act(a)\na = 3\nreturn a + b",
        "a: int = self.a(x)\nreturn act(a)",
        "if y:\n    a = self.a(x)\n    return act(a)\nreturn 2",
    ],
)
def test_drop_assignment(body: str) -> None:
    assert not any("self.a(x)" in statement for statement in drop(body))


def test_drop_a_tuple_part_by_part() -> None:
    assert drop("a, b = self.a(x), self.b(x)\nreturn act(a)", "self.a(x)", "self.b(x)") == ["return op(x)"]
    assert drop("a, b = self.a(x)\nreturn act(a)") == ["return op(x)"]
    with pytest.raises(RewriteRefused, match=r"a part of .* is still needed"):
        drop("a, b = self.a(x), self.b(x)\nreturn act(a)")


@pytest.mark.parametrize(
    "body",
    [
        "a = self.a(x)\nb = act(a)\nreturn a + b",
        "a = self.a(x)\nif y:\n    a = 3\nreturn act(a)",
        "a = self.a(x)\nif y:\n    return a\nreturn act(a)",
        "a = self.a(x)\na += 1\nreturn act(a)",
        "if y:\n    a = self.a(x)\nelse:\n    a = 2\nb = act(a)\nreturn a",
        "try:\n    a = self.a(x)\nexcept ValueError:\n    b = a\nreturn act(a)",
        "a = self.a(x)\nb = act(a)\nreturn lambda: a",
    ],
)
def test_what_is_needed_is_not_dropped(body: str) -> None:
    with pytest.raises(RewriteRefused, match="a is needed for something else"):
        drop(body)


@pytest.mark.parametrize("body", ["self.z = self.a(x)\nreturn act(a)", "a = self.a(x) + 1\nreturn act(a)"])
def test_only_whole_assignments_are_dropped(body: str) -> None:
    with pytest.raises(RewriteRefused):
        drop(body)


def test_replace_body_keeps_the_docstring() -> None:
    edits = edits_of("'''Says what.'''\nx = x + 1\nreturn x")
    edits.replace_body("return op(x)")
    assert result(edits) == ["'Says what.'", "return op(x)"]


@pytest.mark.parametrize(
    "body",
    [
        "if y is not None:\n    x = x + y\nreturn x",
        "return x if x.dtype == y else 2",
        "if self.training:\n    x = x + 1\nreturn x",
        "self.count += 1\nreturn x",
        "y[0] = x\nreturn x",
    ],
)
def test_a_body_that_may_do_something_else_is_not_replaced(body: str) -> None:
    with pytest.raises(RewriteRefused):
        edits_of(body).replace_body("return op(x)")


def test_a_body_that_asks_for_settings_alone_is() -> None:
    edits = edits_of("if self.weight is not None:\n    x = x * self.weight\nreturn x")
    edits.replace_body("return op(x)")
    assert result(edits) == ["return op(x)"]


def test_guards_stay_right() -> None:
    edits = edits_of("k = self.k(x)\nv = self.v(x) if self.v is not None else k\nreturn k, v")
    edits.insert_before(place(edits, "self.k(x)"), "k_out, v_out = op(x)")
    edits.replace(place(edits, "self.k(x)"), "k_out")
    edits.replace(place(edits, "self.v(x)"), "v_out")
    method = compile_method(edits.source, edits.apply())
    method.function.__globals__["op"] = lambda x: (x + 1, x + 2)
    with_v = type("With", (), {"v": 1})()
    without = type("Without", (), {"v": None})()
    assert method.function(with_v, 1) == (2, 3)
    assert method.function(without, 1) == (2, 2)
