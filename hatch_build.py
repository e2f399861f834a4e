"""Compiles the kernels into a wheel where HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 asks for it; else they are at first use."""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Wheels for older systems than this are not known to pip.
_LEAST_GLIBC = 17


class KernelsHook(BuildHookInterface):
    """Compiles every target of this machine's architecture; `pyproject.toml` says when."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the libraries put beside the package's modules."""
        # The package's own way to compile, which needs nothing that is not in the standard library.
        sys.path.insert(0, str(Path(self.root, "src")))
        from transfuse.kernels.cpu.build import compile_library, find_compiler, prebuilt_name, read_sources
        from transfuse.kernels.cpu.targets import architecture_targets

        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError("A wheel with compiled kernels needs a C++ compiler: install g++.")
        sources = read_sources()
        self._folder = tempfile.TemporaryDirectory()
        libraries = []
        for target in architecture_targets():
            folder = Path(self._folder.name, target)
            folder.mkdir()
            libraries.append(compile_library(target, sources, compiler, folder, standalone=True))
            inside = f"transfuse/kernels/cpu/prebuilt/{prebuilt_name(target, sources)}"
            build_data["force_include"][str(libraries[-1])] = inside
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; it is in the wheel."""
        self._folder.cleanup()


def _platform(libraries: list[Path]) -> str:
    """The wheel tag for systems whose C library has all that the libraries ask for."""
    versions = [int(found) for path in libraries for found in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    system = f"manylinux_2_{max(_LEAST_GLIBC, *versions)}" if versions else "linux"
    return f"{system}_{platform.machine()}"
