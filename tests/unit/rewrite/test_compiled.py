"""Rewritten methods run, and read, like those that were written so."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import pathlib
import subprocess
import sys
import traceback
from types import ModuleType
from typing import Any

import pytest

from tests.unit.rewrite import spelled
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import RewriteRefused, method_source, position_of

GOOD = ["simple", "defaults", "annotated", "decorated", "decorated_often", "global_names", "with_docstring"]


def doubled(method: Any) -> Any:
    """The method with its `x * 2` made `x * 3`."""
    source = method_source(method)
    edits = Edits(source)
    product = next(
        node for node in ast.walk(source.tree) if isinstance(node, ast.BinOp) and ast.unparse(node) == "x * 2"
    )
    position = position_of(product)
    assert position is not None
    edits.replace(position, "x * 3")
    return compile_method(source, edits.apply())


def last(value: Any) -> int:
    return last(value[-1]) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", GOOD)
def test_they_run_in_the_place_of_the_original(name: str) -> None:
    original = getattr(spelled.Good, name)
    method = doubled(original)
    before, after = original(spelled.Good(), 10), method.function(spelled.Good(), 10)
    assert last(after) - last(before) == 10
    # Decorators did the same around it.
    assert str(after).replace(str(last(after)), "") == str(before).replace(str(last(before)), "")
    assert inspect.signature(method.function) == inspect.signature(original)
    assert method.function.__qualname__ == original.__qualname__
    assert method.function.__doc__ == original.__doc__


def test_defaults_are_the_same_objects() -> None:
    new = doubled(spelled.Good.defaults).function
    assert new.__kwdefaults__["z"] is spelled.Good.defaults.__kwdefaults__["z"]


def test_a_wrapper_that_knows_itself() -> None:
    method = doubled(spelled.KnowsItself.method).function
    derived = type("Derived", (spelled.KnowsItself,), {"method": method})
    assert derived().method(10) == (True, 30)
    assert spelled.KnowsItself().method(10) == (True, 20)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mangled", "a name that Python mangles"),
        ("generator", "is a generator or a coroutine"),
        ("coroutine", "is a generator or a coroutine"),
        ("own_variables", r"looks at its variables with locals\(\)"),
        ("frames", r"looks at its variables with _getframe\(\)"),
        ("a_lambda", "is a lambda"),
        ("closure", r"closes over captured \(spelled.py:\d+\)"),
        ("built_in", "is not written in Python"),
        ("several_ways", "wrapped by wrapper, which may call it in several ways"),
        ("attribute", "wrapped by wrapper, which calls it by other means"),
        ("in_an_object", "is wrapped in a Callable"),
    ],
)
def test_refusals(name: str, reason: str) -> None:
    with pytest.raises(RewriteRefused, match=reason):
        method_source(vars(spelled.Bad)[name])


def test_super_has_to_go() -> None:
    source = method_source(spelled.Bad.uses_super)
    with pytest.raises(RewriteRefused, match=r"uses super\(\) \(spelled.py:\d+\)"):
        compile_method(source, source.tree)
    edits = Edits(source)
    call = source.tree.body[0].value
    edits.replace(position_of(call), "x + 1")
    assert compile_method(source, edits.apply()).function(spelled.Bad(), 10) == 11


def load(path: pathlib.Path, text: str) -> ModuleType:
    path.write_text(text)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_that_changed_since_it_was_imported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "changing.py"
    module = load(path, "def forward(self, x):\n    return x * 2\n")
    assert doubled(module.forward).function(None, 1) == 3
    path.write_text("def forward(self, x):\n    return x * 9 + 0\n")
    with pytest.raises(RewriteRefused, match=r"the file has changed|is not the source"):
        linecache.checkcache()
        method_source(module.forward)
    path.write_text("\n\ndef forward(self, x):\n    return x * 2\n")
    with pytest.raises(RewriteRefused, match="the file has changed"):
        linecache.checkcache()
        method_source(module.forward)


def test_two_of_one_name_in_one_line(tmp_path: pathlib.Path) -> None:
    text = "class A:\n    def f(self, x): return x * 2\n\nclass B:\n    def f(self, x): return x * 2\n"
    module = load(tmp_path / "short.py", text)
    assert method_source(module.A.f).tree.lineno == 2
    made: dict[str, Any] = {}
    code = "if 1:\n  def f(self, x): return x * 2\n"
    exec(compile(code, "<nowhere>", "exec"), made)
    with pytest.raises(RewriteRefused, match=r"f has no source \(<nowhere>:2\)"):
        method_source(made["f"])


def test_a_traceback_shows_the_line_that_ran() -> None:
    method = doubled(spelled.Good.simple)
    with pytest.raises(TypeError) as caught:
        method.function(None, None)
    text = "".join(traceback.format_exception(caught.value))
    assert f'File "{method.file}", line 2, in simple' in text
    assert "return x * 3" in text
    assert inspect.getsource(method.function) == method.text


SCRIPT = """
from tests.unit.rewrite import spelled
from tests.unit.rewrite.test_compiled import doubled
for name in ("simple", "decorated", "with_docstring"):
    method = doubled(getattr(spelled.Good, name))
    print(method.file, method.text)
"""


def test_two_processes_make_the_same() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "<transfuse Good.simple " in outputs[0]
