"""What a kept verdict depends on, and what happens to a damaged one."""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import transfuse
from tests.zoo import build
from transfuse.engine import unseen, verdicts
from transfuse.engine.unseen import CHECK_VERSION, check_fused, check_model
from transfuse.engine.verdicts import Verdict, kept_verdict, verdict_path
from transfuse.fusion.fingerprint import own_source


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """Models on which the check was run; it always passes."""
    found: list[PreTrainedModel] = []

    def check(model: PreTrainedModel) -> Verdict:
        found.append(model)
        return Verdict(True, "fine", "shrunk")

    monkeypatch.setattr(unseen, "_check", check)
    return found


def _path(model: PreTrainedModel) -> Path:
    return verdict_path(model, Path("cache"), CHECK_VERSION)


def test_the_second_call_reads_the_verdict(llama: PreTrainedModel, checks: list, tmp_path: Path) -> None:
    first = check_model(llama, tmp_path)
    assert check_model(llama, tmp_path) == first == Verdict(True, "fine", "shrunk")
    assert len(checks) == 1
    (file,) = (tmp_path / "verdicts").iterdir()
    assert json.loads(file.read_text()) == {
        "passed": True,
        "reason": "fine",
        "checked_on": "shrunk",
        "refused": {},
        "whole_texts": False,
    }


def test_another_model_of_the_same_source_and_config_shares_it(checks: list, tmp_path: Path) -> None:
    for seed in (0, 1):
        check_model(build("llama", seed), tmp_path)
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rms_norm_eps", 0.5),
        ("rope_parameters", {"rope_theta": 7.0, "rope_type": "default"}),
        ("num_hidden_layers", 7),
        ("a_new_setting", None),
    ],
)
def test_a_changed_setting_asks_for_another_check(setting: str, value: object, checks: list, tmp_path: Path) -> None:
    model = build("llama")
    check_model(model, tmp_path)
    setattr(model.config, setting, value)
    check_model(model, tmp_path)
    assert len(checks) == 2


def test_settings_without_effect_do_not(llama: PreTrainedModel) -> None:
    before = _path(llama)
    model = build("llama")
    model.config._name_or_path = "elsewhere"
    assert _path(model) == before
    assert _path(model.bfloat16()) == before


def test_types_have_different_verdicts(llama: PreTrainedModel) -> None:
    assert _path(build("mistral")) != _path(llama)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("transfuse.__version__", "99"),
        ("torch.__version__", "99"),
        ("transfuse.fusion.fingerprint.version", lambda _: ""),
    ],
)
def test_versions_count(where: str, what: object, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _path(llama)
    monkeypatch.setattr(where, what)
    assert _path(llama) != before


def test_fused_has_a_verdict_of_its_own(
    llama: PreTrainedModel, checks: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Verdict(True, "in part", "shrunk", {"LlamaMLP": "it differs"})
    monkeypatch.setattr(unseen, "_check", lambda model, compare=None: checks.append(model) or wrong)
    assert check_fused(llama, tmp_path) == check_fused(llama, tmp_path) == wrong
    assert len(checks) == 1
    check_model(llama, tmp_path)
    assert len(checks) == 2
    # Another way to fuse asks for another check.
    monkeypatch.setattr(unseen, "own_source", lambda: "another digest")
    check_fused(llama, tmp_path)
    assert len(checks) == 3
    # So do other kernels.
    monkeypatch.setattr(unseen, "kernels_key", lambda cache_dir: "other kernels")
    check_fused(llama, tmp_path)
    assert len(checks) == 4
    check_model(llama, tmp_path)
    assert len(checks) == 4


def test_the_digest_of_what_fuses_is_of_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "transfuse"
    shutil.copytree(Path(transfuse.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(transfuse, "__file__", str(package / "__init__.py"))
    same = own_source.__wrapped__()
    assert same == own_source.__wrapped__()
    for changed in ("fusion/norm.py", "kernels/fused_ops.py", "rewrite/edit.py", "trace/recorder.py"):
        path = package / changed
        path.write_text(path.read_text() + "# changed\n")
        assert own_source.__wrapped__() != same
        same = own_source.__wrapped__()
    (package / "cli" / "app.py").write_text("# changed")
    assert own_source.__wrapped__() == same


def test_the_checks_own_version_counts(
    llama: PreTrainedModel, checks: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_model(llama, tmp_path)
    monkeypatch.setattr(unseen, "CHECK_VERSION", CHECK_VERSION + 1)
    check_model(llama, tmp_path)
    assert len(checks) == 2


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PreTrainedModel]:
    """A function from source text to a Llama whose MLPs are of a class in a file with that text."""
    file = tmp_path / "own_code.py"

    def make(text: str) -> PreTrainedModel:
        file.write_text(text)
        module = types.ModuleType("own_code")
        module.__file__ = str(file)
        exec(compile(text, file, "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, "own_code", module)
        model = build("llama")
        model.model.layers[1].mlp.__class__ = module.MLP
        return model

    return make


def test_source_of_every_module_counts(own_code: Callable[[str], PreTrainedModel], llama: PreTrainedModel) -> None:
    text = "from transformers.models.llama.modeling_llama import LlamaMLP\nclass MLP(LlamaMLP): pass\n"
    before = _path(own_code(text))
    assert before != _path(llama)
    assert _path(own_code(text)) == before
    assert _path(own_code(text + "# changed\n")) != before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "\x00",
        '{"passed": true}',
        '{"passed": "no", "reason": "", "checked_on": ""}',
        '{"passed": true, "reason": "", "checked_on": "", "refused": []}',
    ],
)
def test_damaged_verdicts_are_reported_and_found_again(
    text: str, llama: PreTrainedModel, checks: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_model(llama, tmp_path)
    (file,) = (tmp_path / "verdicts").iterdir()
    file.write_text(text)
    assert check_model(llama, tmp_path).passed
    assert f"ignoring the damaged verdict {file}" in caplog.text
    assert len(checks) == 2
    caplog.clear()
    assert kept_verdict(file) == Verdict(True, "fine", "shrunk"), "it was written anew"
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_reported(
    llama: PreTrainedModel, checks: list, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert check_model(llama, blocked).passed
    assert "its verdict was not kept" in caplog.text


def test_nothing_but_the_verdict_is_left(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "verdicts" / "one.json"
    verdicts.keep_verdict(path, Verdict(False, 'says "no"\n', "loaded"))
    assert list(path.parent.iterdir()) == [path]
    assert kept_verdict(path) == Verdict(False, 'says "no"\n', "loaded")


def test_an_error_without_a_message_shows_the_line_that_raised_it() -> None:
    def fail(size: int) -> None:
        assert size == 2

    with pytest.raises(AssertionError) as caught:
        fail(3)
    error = AssertionError().with_traceback(caught.value.__traceback__)
    assert re.fullmatch(r"AssertionError: assert size == 2 \(test_verdicts.py:\d+\)", verdicts.where(error))
    assert verdicts.where(AssertionError()) == "AssertionError: no message"
