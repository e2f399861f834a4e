"""What chooses tokens, in both implementations."""

from __future__ import annotations

import pytest

from transfuse.engine.sampling import SamplingKernels, sampling_kernels
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.loading import load_kernels


@pytest.fixture(scope="session")
def compiled_library() -> Library:
    """The compiled kernels, where they can be built."""
    loaded = load_kernels()
    if loaded.library is None:
        pytest.skip(loaded.origin)
    return loaded.library


@pytest.fixture(scope="session", params=["torch", "compiled"], name="sampling_kernels")
def both_sampling_kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    """Torch's kernels, and the compiled ones."""
    library = request.getfixturevalue("compiled_library") if request.param == "compiled" else None
    return sampling_kernels(library, num_threads=2)
