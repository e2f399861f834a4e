from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Result
from tests.zoo import tiny_config
from transfuse.engine.unseen import check_fused
from transfuse.fusion.plan import FusionPlan
from transfuse.inspect.units import TIMES
from transfuse.models.loader import load_model
from transfuse.models.resolve import resolve_model

Run = Callable[..., Result]
DECODER = Path(__file__).parents[3] / "examples" / "decoder.py"


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function from a zoo name to a folder with its config and nothing else."""
    monkeypatch.setenv("TRANSFUSE_CACHE_DIR", str(tmp_path / "cache"))

    def folder(name: str) -> str:
        path = tmp_path / name
        tiny_config(name).save_pretrained(path)
        return str(path)

    return folder


def test_a_config_is_enough_for_the_tree(run: Run, config_folder: Callable[[str], str]) -> None:
    result = run("inspect", config_folder("llama"))
    assert (result.code, result.err) == (0, "")
    for part in (
        "LlamaForCausalLM",
        f"layers.0-1 {TIMES}2",
        "✓ qkv: q_proj, k_proj, v_proj → linear",
        "in qkv",
        "took",
    ):
        assert part in result.out
    assert "unknown: the first start checks" in result.out


def test_the_config_file_itself_will_do(run: Run, config_folder: Callable[[str], str]) -> None:
    folder = Path(config_folder("llama"))
    assert "LlamaForCausalLM" in run("inspect", str(folder / "config.json")).out
    renamed = folder.parent / "mine.json"
    renamed.write_text((folder / "config.json").read_text())
    assert run("inspect", str(renamed)).out.startswith("● mine LlamaForCausalLM")


def test_a_model_with_weights_needs_none_of_them(run: Run, zoo_folder: Callable[[str], Path], tmp_path: Path) -> None:
    result = run("inspect", str(zoo_folder("llama")), "--cache-dir", str(tmp_path))
    assert result.code == 0
    assert "LlamaForCausalLM" in result.out


def test_a_verdict_that_is_kept_tells_the_implementation(
    run: Run, zoo_folder: Callable[[str], Path], tmp_path: Path, one_thread: None
) -> None:
    folder = zoo_folder("llama")
    module = load_model(resolve_model(folder, cache_dir=tmp_path), show_progress=False).module
    assert check_fused(module, tmp_path).passed
    found = json.loads(run("inspect", str(folder), "--cache-dir", str(tmp_path), "--json").out)
    assert found["implementation"]["name"] == "fused"


def test_experts_are_shown(run: Run, config_folder: Callable[[str], str]) -> None:
    result = run("inspect", config_folder("qwen3_moe"))
    assert result.code == 0
    assert "Qwen3MoeExperts" in result.out


def test_a_refused_model_is_shown_with_the_reason_and_the_place(run: Run, config_folder: Callable[[str], str]) -> None:
    result = run("inspect", config_folder("blt"))
    assert result.code == 0
    assert "breaks off" in result.out
    assert "modeling_blt.py:" in result.out
    assert "not run" in result.out


def test_a_model_that_takes_no_row_of_several_requests_is_shown_as_it_runs(
    run: Run, config_folder: Callable[[str], str]
) -> None:
    result = run("inspect", config_folder("doge"))
    assert result.code == 0
    assert "as Transformers runs it, since a row of several requests" in result.out
    assert "modeling_doge.py:" in result.out
    assert "not run" not in result.out


def test_source_is_a_diff(run: Run, config_folder: Callable[[str], str]) -> None:
    folder = config_folder("llama")
    result = run("inspect", folder, "--source")
    assert result.code == 0
    assert "modeling_llama.py:" in result.out
    assert "-     key_states = self.k_proj(hidden_states)" in result.out
    assert "torch.ops.transfuse.rotary" in result.out
    one = run("inspect", folder, "--class", "LlamaMLP").out
    assert "torch.ops.transfuse.linear_glu" in one
    assert "rotary" not in one
    other = run("inspect", folder, "--class", "Nothing")
    assert other.code == 2
    assert "Rewritten were: LlamaAttention" in other.err


def test_json_holds_the_plan_the_counts_and_the_costs(run: Run, config_folder: Callable[[str], str]) -> None:
    result = run("inspect", config_folder("llama"), "--json")
    found = json.loads(result.out)
    plan = FusionPlan.from_json(json.dumps(found["plan"]))
    assert plan.num_fused_linears == plan.num_linears == 15
    before, after = found["nodes"]["before"], found["nodes"]["after"]
    assert before["by_kind"]["call_module"] == 16
    assert after["by_kind"]["call_module"] == 1
    assert found["costs"]["total"]["flops"] == found["costs"]["by_class"]["LlamaMLP"]["flops"] + sum(
        found["costs"]["by_class"][name]["flops"] for name in ("LlamaAttention", "LlamaForCausalLM")
    )
    assert len(found["costs"]["attention"]) == 2


def test_html_is_written(run: Run, config_folder: Callable[[str], str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("inspect", config_folder("llama"), "--html", str(page))
    assert (result.code, result.out, result.err) == (0, "", f"wrote {page}\n")
    assert page.read_text().startswith("<!DOCTYPE html>")
    failed = run("inspect", config_folder("llama"), "--html", str(tmp_path / "no" / "page.html"))
    assert failed.code == 2
    assert "cannot be written" in failed.err


def test_plain_pytorch_is_inspected_alike(run: Run) -> None:
    result = run("inspect", f"{DECODER}:Decoder")
    assert result.code == 0
    for part in (f"layers.0-3 {TIMES}4", "✓ glu: w1, w3 → linear_glu", "28 of 28", "241 nodes", "attributes 8"):
        assert part in result.out
    assert "auto takes" not in result.out
    given = run("inspect", f"{DECODER}:Decoder", "--init", '{"num_layers": 2}', "--input", "1,5,256")
    assert f"layers.0-1 {TIMES}2" in given.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("/nowhere",), 2, "no file or folder /nowhere"),
        (("nowhere.py:Class",), 2, "no file nowhere.py"),
        ((f"{DECODER}:Decoder", "--input", "wide"), 2, "is not SHAPE"),
        ((f"{DECODER}:Decoder", "--init", "{"), 2, "not valid JSON"),
        ((f"{DECODER}:Decoder", "--init", '{"depth": 1}'), 1, "cannot be built: TypeError"),
        ((f"{DECODER.parent}", "--input", "1,7"), 2, "are for a Python class"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run("inspect", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_code_in_a_folder_is_run_only_when_it_is_trusted(run: Run, config_folder: Callable[[str], str]) -> None:
    folder = Path(config_folder("llama"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    config["model_type"] = "mine"
    (folder / "config.json").write_text(json.dumps(config))
    for name in (folder, folder / "config.json"):
        result = run("inspect", str(name))
        assert result.code == 2
        assert "--trust-remote-code" in result.err
