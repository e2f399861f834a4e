"""Which kernels the sampler is given."""

from __future__ import annotations

import torch

from transfuse.engine.sampling import CompiledSampling, SamplingKernels, TorchSampling, sampling_kernels
from transfuse.kernels.cpu.library import Library


def test_without_a_library_torch_serves() -> None:
    assert isinstance(sampling_kernels(None, 2), TorchSampling)


def test_with_a_library_the_compiled_kernels_serve(compiled_library: Library) -> None:
    kernels: SamplingKernels = sampling_kernels(compiled_library, 2)
    assert isinstance(kernels, CompiledSampling)
    before = compiled_library.executions("argmax")
    assert kernels.argmax(torch.eye(3)) == ([0, 1, 2], [True] * 3)
    assert compiled_library.executions("argmax") == before + 1
