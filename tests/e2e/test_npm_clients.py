"""The official SDKs for JavaScript against the server, where Node and they are there.

`npm install --omit=optional --no-package-lock --prefix tests/clients` brings them; `.ci/run` does.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.serving import make_model, serve

CLIENTS = Path(__file__).parents[1] / "clients"
NUM_CHECKS = 11


def test_the_sdks_for_javascript(zoo_folder: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any]) -> None:
    node = shutil.which("node")
    if node is None or not all((CLIENTS / "node_modules" / name).is_dir() for name in ("openai", "@anthropic-ai/sdk")):
        pytest.skip("needs Node and npm install --omit=optional --no-package-lock --prefix tests/clients")
    folder = make_model(zoo_folder("llama"), tmp_path / "llama", 4096)
    with serve(folder, settings["cache_dir"], 2**26) as server:
        done = subprocess.run(
            [node, str(CLIENTS / "sdks.mjs"), server.url], capture_output=True, text=True, timeout=120
        )
        server.wait_idle()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == NUM_CHECKS
