"""Ahead-of-time builds of the GEMM with 4-bit weights: all tiles, minima and zeros, K whole and in parts."""

import torch

from kernels.gemm.dense.triton import GemmTile
from kernels.gemm.int4.layout import GROUP, SPAN, GpuInt4
from kernels.gemm.int4.triton import FEW, FLOAT32, MANY, _int4_gemm_kernel, int4_gemm
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import recorded, tensor

# One shape for both tiles, so that a row's bits don't depend on its tile. Before Hopper, Triton has only one shape.
_WGMMA = "m64n64k16"
# A K of one part, and a K of four.
_SHORT, _LONG = 512, 2048


def shipped() -> list[KernelBuild]:
    half = torch.float16
    return [
        _gemm("few-zeros-split", FEW, _LONG, has_zeros=True, split=True),
        _gemm("few-minima-fp16-bias-part-of-a-span", FEW, _SHORT + 16, dtype=half, bias=True),
        _gemm("many-zeros", MANY, _SHORT, has_zeros=True),
        _gemm("many-minima-fold-bias", MANY, _LONG, bias=True),
        _gemm("float32-zeros-fold", FLOAT32, _LONG, dtype=torch.float32, has_zeros=True),
    ]


def _gemm(
    name: str,
    tile: GemmTile,
    K: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_zeros: bool = False,
    bias: bool = False,
    split: bool = False,
) -> KernelBuild:
    M, N, num_spans = 40, 2048, -(-K // SPAN)
    weight = GpuInt4(
        packed_NB=tensor(torch.uint8, N, num_spans * GROUP),
        scales_SN=tensor(torch.int64, num_spans, N),
        has_zeros=has_zeros,
        num_inputs=K,
    )
    is_16_bit = dtype is not torch.float32
    return recorded(
        name,
        lambda: int4_gemm(
            tensor(dtype, M, K), weight, bias_N=tensor(dtype, N) if bias else None, tile=tile, split=split
        ),
        kernel=_int4_gemm_kernel,
        expects_wgmma=is_16_bit,
        wgmma_shape=_WGMMA if is_16_bit else "",
    )
