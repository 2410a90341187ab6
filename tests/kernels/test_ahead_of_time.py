"""Every kernel as it ships, compiled for sm_80, sm_89 and sm_90 without a GPU.

A configuration that spills, that asks for more shared memory than there is, or that lost wgmma would run, slowly or not
at all, only where no test runs.
"""

from concurrent.futures import Future

import pytest

from tests.support.ahead_of_time import (
    SHARED_MEMORY_LIMITS,
    Compiled,
    Target,
    builds_of,
    shipped_targets,
)

# An instruction names a register by 8 bits.
MAX_REGISTERS = 255


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", shipped_targets(), ids=lambda target: str(target).replace(" ", "-"))
def test_fits_the_gpu(target: Target, compilations: dict[str, "Future[Compiled]"]) -> None:
    result = compilations[str(target)].result()
    assert not result.error, result.error
    assert (result.stack, result.local) == (0, 0), f"spills: {result}"
    assert 0 < result.registers <= MAX_REGISTERS
    assert result.shared <= SHARED_MEMORY_LIMITS[target.arch], result
    build = builds_of(target.op)[target.build]
    if target.arch == 90:
        assert bool(result.wgmma) >= build.expects_wgmma, f"no wgmma: {result}"
        assert not build.wgmma_shape or result.wgmma == [build.wgmma_shape], f"not one instruction for all: {result}"
    assert result.has_vectors >= build.expects_vectors, f"no 16-byte accesses: {result}"
