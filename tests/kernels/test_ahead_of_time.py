"""Kernels as they ship, compiled for sm_80, sm_89 and sm_90 without a GPU.

Configurations that spill, exceed the shared memory or lose wgmma would run slowly or not at all on GPUs, where no test
runs. This is a sample; `python -m benchmarks.kernels.gpu_builds` compiles all.
"""

from concurrent.futures import Future

import pytest

from kernels.triton_common.kernel_build import ARCHS
from tests.support.kernels.ahead_of_time import (
    Compiled,
    Target,
    builds_of,
    objections,
    sampled_targets,
    shipped_targets,
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", sampled_targets(), ids=lambda target: str(target).replace(" ", "-"))
def test_fits_the_gpu(target: Target, compilations: dict[str, "Future[Compiled]"]) -> None:
    result = compilations[str(target)].result()
    assert not objections(target, result), result


def test_the_sample_has_each_kernel_for_each_gpu() -> None:
    def kernels(targets: list[Target]) -> dict[int, set[object]]:
        return {arch: {builds_of(each.op)[each.build].fn for each in targets if each.arch == arch} for arch in ARCHS}

    assert kernels(sampled_targets()) == kernels(shipped_targets())
