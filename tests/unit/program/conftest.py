"""What tests of programs share."""

from __future__ import annotations

import pytest

from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.loading import load_kernels


@pytest.fixture(scope="session")
def library() -> Library:
    """The kernels that programs run on this machine; other targets are tested kernel by kernel."""
    loaded = load_kernels()
    if loaded.library is None:
        pytest.skip(loaded.origin)
    return loaded.library
