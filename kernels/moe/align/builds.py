"""Ahead-of-time builds of alignment: for 256 experts."""

from kernels.moe.align import triton as gpu
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import int32, recorded


def shipped() -> list[KernelBuild]:
    return [
        recorded(name, lambda: gpu.align(int32(256, 8), 256, 64), kernel=kernel)
        for name, kernel in (("count", gpu._count_kernel), ("place", gpu._place_kernel))
    ]
