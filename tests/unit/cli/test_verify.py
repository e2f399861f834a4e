from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Result
from transfuse.verify import run as verify_run
from transfuse.verify.checks import held
from transfuse.verify.modules import PlaceError
from transfuse.verify.report import Report

Run = Callable[..., Result]

PLACE = PlaceError("model.norm", "Norm", "norm", "result", "m.py:7", (), 0.5, None, False)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Has the verification measure `error`; what it was asked for is put beside it."""
    asked: dict[str, Any] = {"error": 0.0, "folder": str(tmp_path)}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

    def verify(config: Any, source: Any, extent: Any, *, command: str, note: Callable[[str], None]) -> Report:
        asked.update(config=config, extent=extent)
        note("oracle")
        check = held("modules", "norm", asked["error"], 0.1)
        first = PLACE if check.status == "fail" else None
        return Report("m", "M", "plain", "why", "float32", {}, command, (check,), first, 1, {"oracle": 2048}, 1.0)

    monkeypatch.setattr(verify_run, "verify", verify)
    return asked


def test_a_pass_is_a_table_and_0(run: Run, verified: dict[str, Any]) -> None:
    result = run("verify", verified["folder"], "--quick", "--max-tokens", "7", "--dtype", "float32")
    assert result.code == 0
    assert "PASS" in result.out
    assert "2.00 KiB" in result.out
    assert "oracle" in result.err
    assert (verified["extent"].quick, verified["extent"].max_tokens) == (True, 7)
    assert verified["config"].model.dtype == "float32"


def test_a_failure_names_the_module_and_is_1(run: Run, verified: dict[str, Any]) -> None:
    verified["error"] = 0.5
    result = run("verify", verified["folder"], "--quiet")
    assert result.code == 1
    assert "first divergence: model.norm (Norm, m.py:7" in result.out
    assert result.err == ""


def test_json_and_markdown(run: Run, verified: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    result = run("verify", verified["folder"], "--json", "--markdown", str(file))
    assert json.loads(result.out)["passed"] is True
    assert file.read_text().startswith("## `transfuse verify`: m")


@pytest.mark.parametrize("option", ["--prompts", "--markdown"])
def test_a_wrong_file_is_2(run: Run, verified: dict[str, Any], tmp_path: Path, option: str) -> None:
    result = run("verify", verified["folder"], option, str(tmp_path / "missing" / "file"))
    assert result.code == 2
    assert "transfuse: error:" in result.err


def test_a_wrong_model_is_2(run: Run, tmp_path: Path) -> None:
    assert run("verify", str(tmp_path / "missing")).code == 2
