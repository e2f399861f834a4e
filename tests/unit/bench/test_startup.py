from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from transfuse.bench import startup as startup_module
from transfuse.bench.startup import Startup, measure_startup
from transfuse.errors import BenchmarkError

# Stands in for `python -m transfuse serve`: says that it is ready, and answers.
SERVER = """
import http.server, json, sys
sys.stderr.write("noise\\n" * 3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
facts = {"event": "ready", "url": f"http://127.0.0.1:{server.server_port}", "load_seconds": 0.25, "args": sys.argv[1:]}
print(json.dumps(facts), file=sys.stderr, flush=True)
server.serve_forever()
"""
PROBE = "import json, sys; print('noise'); print(json.dumps({'ready_s': 1.5, 'kind': len(sys.argv)}))"


def startup(**settings: Any) -> Startup:
    arguments: dict[str, Any] = {
        "model": "m",
        "modelling_module": "json",
        "llm_arguments": {},
        "serve_arguments": [],
        "fresh_cache": False,
    }
    return Startup(**arguments | settings)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has `python -m` find stand-ins for the package."""
    folder = tmp_path / "transfuse"
    (folder / "bench").mkdir(parents=True)
    for path in (folder, folder / "bench"):
        (path / "__init__.py").touch()
    (folder / "__main__.py").write_text(SERVER)
    (folder / "bench" / "startup_probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


def test_kinds_take_turns_and_are_pooled(package: Path) -> None:
    notes: list[str] = []
    rows = measure_startup(startup(), ["llm", "serve"], runs=2, note=notes.append)
    assert notes == ["llm, run 1 of 2", "serve, run 1 of 2", "llm, run 2 of 2", "serve, run 2 of 2"]
    llm, serve = rows
    assert (llm.settings, llm.value("ready_s")) == ({"start": "llm"}, 1.5)
    ready, first = serve.value("ready_s"), serve.value("first_token_s")
    assert ready is not None and first is not None
    assert 0 < ready < first
    assert (serve.value("load_s"), serve.value("analysis_s")) == (0.25, None)
    assert serve.value("rss_mb") > 1  # type: ignore[operator]


def test_a_server_that_ends_first_is_an_error_with_its_last_words(package: Path) -> None:
    (package / "__main__.py").write_text("import sys; sys.exit('no such model')")
    with pytest.raises(BenchmarkError, match="no such model"):
        measure_startup(startup(), ["serve"], runs=1, note=print)


def test_a_probe_that_fails_is_an_error_with_its_last_words(package: Path) -> None:
    (package / "bench" / "startup_probe.py").write_text("raise SystemExit('broken')")
    with pytest.raises(BenchmarkError, match="broken"):
        measure_startup(startup(), ["llm"], runs=1, note=print)


def test_each_start_may_have_a_cache_folder_of_its_own(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    def run_probe(arguments: list[str]) -> dict[str, float]:
        given = json.loads(arguments[1])
        folders.append(given["cache_dir"])
        assert Path(folders[-1]).is_dir() and not list(Path(folders[-1]).iterdir())
        assert (given["model"], given["dtype"]) == ("m", "float32")
        return {"ready_s": 1.0}

    monkeypatch.setattr(startup_module, "_run_probe", run_probe)
    measure_startup(startup(fresh_cache=True, llm_arguments={"dtype": "float32"}), ["llm"], runs=2, note=print)
    assert len(set(folders)) == 2
    assert not any(Path(folder).exists() for folder in folders)


def test_imports_are_timed_by_the_real_probe(tmp_path: Path) -> None:
    import subprocess
    import time

    command = [sys.executable, "-m", "transfuse.bench.startup_probe", repr(time.time()), "imports", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    parts = found["python_s"] + found["torch_s"] + found["modelling_module_s"]
    assert found["ready_s"] == pytest.approx(parts)
    assert found["torch_s"] > found["modelling_module_s"] > 0
