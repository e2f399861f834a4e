"""Rewritten classes as a Python file."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.rewrite import spelled
from tests.unit.rewrite.test_compiled import GOOD, doubled, last
from transfuse.rewrite.export import as_module
from transfuse.rewrite.source import RewriteRefused


class Setting:
    """What a class may be given besides methods."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Setting({self.value})"


def rewritten(name: str) -> type:
    method = doubled(getattr(spelled.Good, name)).function
    return type("Good", (spelled.Good,), {name: method, "setting": Setting(3), "__module__": spelled.__name__})


def imported(text: str, folder: Path) -> ModuleType:
    path = folder / "written.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GOOD)
def test_it_runs_equal_when_imported(name: str, tmp_path: Path) -> None:
    cls = rewritten(name)
    module = imported(as_module([cls], "Written for a test.", ["math"]), tmp_path)
    assert module.__doc__ == "Written for a test."
    assert module.math is math
    again = module.FusedGood
    assert again.__bases__ == (spelled.Good,)
    assert again.setting.value == 3
    assert getattr(again(), name)(10) == getattr(cls(), name)(10)
    assert last(getattr(again(), name)(10)) - last(getattr(spelled.Good(), name)(10)) == 10


def test_it_imports_what_it_needs_and_no_more() -> None:
    tree = ast.parse(as_module([rewritten("global_names")], "x"))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports == [
        "from __future__ import annotations",
        "from tests.unit.rewrite.spelled import Good, OFFSET",
        "from tests.unit.rewrite.test_export import Setting",
    ]


def test_classes_of_one_name_are_numbered(tmp_path: Path) -> None:
    module = imported(as_module([rewritten("simple"), rewritten("with_docstring")], "x"), tmp_path)
    assert module.FusedGood().simple(10) == 30
    assert module.FusedGood2().with_docstring(10) == 30


def test_what_cannot_be_imported() -> None:
    class Local:
        pass

    with pytest.raises(RewriteRefused, match=r"test_what_cannot_be_imported.<locals>.Local cannot be imported"):
        as_module([type("Derived", (Local,), {})], "x")


def test_names_that_clash() -> None:
    clashing = type("Setting", (), {"__repr__": lambda self: "Setting()", "__module__": "math"})
    math.Setting = clashing  # type: ignore[attr-defined]
    try:
        cls = type("Good", (spelled.Good,), {"one": Setting(1), "two": clashing()})
        with pytest.raises(RewriteRefused, match="Setting has two meanings"):
            as_module([cls], "x")
    finally:
        del math.Setting  # type: ignore[attr-defined]
