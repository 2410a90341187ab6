"""Builds that the lint of compiled code must object to."""

import torch
import triton.language as tl

from kernels.attention.paged.builds import by_numbers
from kernels.triton_common.jit import jit
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.numbers import dot
from kernels.triton_common.recording import recorded, tensor


def shipped() -> list[KernelBuild]:
    return [by_numbers(), _scales_of_2_bytes()]


def _scales_of_2_bytes() -> KernelBuild:
    """Weights whose scales are loaded within the loop, as the 4-bit GEMM did: no copy to shared memory has 2 bytes."""

    def launch() -> None:
        matrix = tensor(torch.float16, 64, 4096)
        _scaled_kernel[(1,)](matrix, matrix, tensor(torch.float16, 64, 64), matrix, 4096, BLOCK=64)

    return recorded("scales-of-2-bytes", launch, archs=(90,))


@jit
def _scaled_kernel(x, w, scales, out, K, BLOCK: tl.constexpr):
    """out[m, n] = the sum of x[m, k] * w[n, k] * scales[k // BLOCK, n]."""
    row, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(K // BLOCK):
        column = step * BLOCK + k
        weight = tl.load(w + row[None] * K + column[:, None]) * tl.load(scales + step * BLOCK + row)[None]
        acc = dot(tl.load(x + row[:, None] * K + column[None]), weight, acc)
    tl.store(out + row[:, None] * BLOCK + row[None], acc.to(out.dtype.element_ty))
