"""The page that is shipped is what its sources build: by the record that the build leaves, and by building it anew."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from transfuse.server.page_files import PAGE_FOLDER

WEB = Path(__file__).parents[3] / "web"
RECORD = "build.json"
SOURCES = ["index.html", "package-lock.json", "package.json", "public", "src", "tsconfig.json", "vite.config.js"]
MEND = "Run `npm ci && npm run build` in web/, and commit what changed."


def digests(folder: Path, paths: list[Path]) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_page_is_built_from_the_sources_as_they_are() -> None:
    record = json.loads((PAGE_FOLDER / RECORD).read_text())
    parts = [WEB / name for name in SOURCES]
    sources = [file for part in parts for file in ([part] if part.is_file() else files_below(part))]
    assert digests(WEB, sources) == record["sources"], f"web/ was changed and not built. {MEND}"


def test_nothing_of_the_build_was_changed_by_hand() -> None:
    record = json.loads((PAGE_FOLDER / RECORD).read_text())
    built = [path for path in files_below(PAGE_FOLDER) if path.name != RECORD]
    assert digests(PAGE_FOLDER, built) == record["built"], f"Built files differ from their record. {MEND}"


def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("builds the page, and there is no npm")
    if not (WEB / "node_modules").exists():
        pytest.skip("builds the page, and its tools are not installed: `npm ci` in web/ does that")
    command = ["npm", "run", "build", "--silent"]
    subprocess.run(command, cwd=WEB, check=True, env={**os.environ, "PAGE_OUTPUT": str(tmp_path)}, timeout=120)
    assert digests(tmp_path, files_below(tmp_path)) == digests(PAGE_FOLDER, files_below(PAGE_FOLDER)), MEND


def test_the_page_names_no_other_server() -> None:
    allowed = {b"http://www.w3.org/"}  # names of formats, which nobody fetches
    for path in files_below(PAGE_FOLDER):
        content = path.read_bytes()
        for name in allowed:
            content = content.replace(name, b"")
        assert b"http://" not in content and b"https://" not in content, path
