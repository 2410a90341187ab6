"""Ahead-of-time builds of the batch-invariant GEMM: all tiles, with K whole, in parts within one program, and in parts
of separate programs."""

import torch

from kernels.gemm.dense.triton import FEW, FLOAT32, MANY, GemmTile, _add_parts_kernel, _gemm_kernel, invariant_gemm
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import recorded, tensor

# One shape for all tiles, so that a row's bits don't depend on its tile. Before Hopper, Triton has only one shape.
_WGMMA = "m64n128k16"
# A K of one part, and a K of four.
_SHORT, _LONG = 512, 2048


def shipped() -> list[KernelBuild]:
    half = torch.float16
    return [
        _gemm("few-split", FEW, _LONG, split=True),
        _gemm("few-fp16-bias-part-of-a-step", FEW, _SHORT + 16, dtype=half, bias=True),
        _gemm("many", MANY, _SHORT),
        _gemm("many-fold-bias", MANY, _LONG, bias=True),
        _gemm("float32-fold", FLOAT32, _LONG, dtype=torch.float32),
        recorded(
            "add-parts-bias",
            lambda: _run(FEW, _LONG, torch.bfloat16, bias=True, split=True),
            kernel=_add_parts_kernel,
            expects_vectors=True,
        ),
    ]


def _gemm(
    name: str,
    tile: GemmTile,
    K: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    split: bool = False,
) -> KernelBuild:
    is_16_bit = dtype is not torch.float32
    return recorded(
        name,
        lambda: _run(tile, K, dtype, bias=bias, split=split),
        kernel=_gemm_kernel,
        expects_wgmma=is_16_bit,
        wgmma_shape=_WGMMA if is_16_bit else "",
    )


def _run(tile: GemmTile, K: int, dtype: torch.dtype, *, bias: bool, split: bool) -> None:
    M, N = 40, 2048
    bias_N = tensor(dtype, N) if bias else None
    invariant_gemm(tensor(dtype, M, K), tensor(dtype, N, K), bias_N, tensor(dtype, M, N), tile=tile, split=split)
