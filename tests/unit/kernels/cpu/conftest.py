"""The compiled kernels, once for each target; those that this machine does not run are skipped."""

from __future__ import annotations

import pytest

from transfuse.config import default_cache_dir
from transfuse.kernels.cpu.build import build
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.targets import architecture_targets, machine_targets, refused_target

# Where users' are too: what was compiled before serves, and tests that run models find it.
FOLDER = default_cache_dir() / "kernels"


@pytest.fixture(scope="session", params=architecture_targets())
def library(request: pytest.FixtureRequest) -> Library:
    """The kernels for one target; processes that test at the same time compile it once."""
    if request.param not in machine_targets():
        pytest.skip(refused_target() or f"this processor has not all instructions of {request.param}")
    return Library(build(request.param, FOLDER))


@pytest.fixture(scope="session")
def best_library() -> Library:
    """The kernels for the fastest target of this machine."""
    return Library(build(machine_targets()[0], FOLDER))
