"""Builds that the lint of compiled code must object to."""

from kernels.attention.paged.builds import by_numbers
from kernels.triton_common.kernel_build import KernelBuild


def shipped() -> list[KernelBuild]:
    return [by_numbers()]
