"""Ahead-of-time builds of the FP8 GEMM: default tiles, the batch-invariant tile, and what tuned configurations may add.

128 x 128 x 128 with block scales spills at 4 warps (255 registers, 216 bytes of stack), but not at 8.
"""

from dataclasses import replace
from typing import Any

import torch

from kernels.gemm.fp8.choose import BATCH_INVARIANT_TILE, default_tile
from kernels.gemm.fp8.triton import _gemm_kernel, _reduce_kernel, triton_gemm
from kernels.triton_common.kernel_build import FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import float32, recorded, tensor
from kernels.triton_common.tuned_tiles import Tile

_WGMMA_ROWS = 64
_N, _K = 4096, 4096


def shipped() -> list[KernelBuild]:
    builds = [
        _gemm(f"{scales}-{M}-rows", default_tile(M, 1 << 20, _K, 132), blockwise=scales == "block")
        for scales in ("block", "channel")
        for M in (16, 128, 4096)
    ]
    wide = Tile(block_m=128, block_n=128, block_k=128, group_m=16, num_warps=8, num_stages=3)
    few, split = default_tile(16, 1 << 20, _K, 132), default_tile(16, _N, _K, 132)
    parts = replace(few, split_k=4)
    return [
        *builds,
        _gemm("block-batch-invariant", BATCH_INVARIANT_TILE, blockwise=True),
        _gemm("block-tuned-wide", wide, blockwise=True),
        _gemm("channel-tuned-wide", wide, blockwise=False),
        _gemm("block-split-k", split, blockwise=True),
        _gemm("block-fp16-bias", few, blockwise=True, out=torch.float16, bias=True),
        _gemm("channel-odd-k", few, blockwise=False, K=_K + 16),
        _gemm("reduce-block", parts, blockwise=True, kernel=_reduce_kernel),
        _gemm("reduce-channel-bias", parts, blockwise=False, bias=True, kernel=_reduce_kernel),
    ]


def _gemm(
    name: str,
    tile: Tile,
    *,
    blockwise: bool,
    K: int = _K,
    out: torch.dtype = torch.bfloat16,
    bias: bool = False,
    kernel: Any = _gemm_kernel,
) -> KernelBuild:
    M, e4m3 = 8, torch.float8_e4m3fn
    # M-major, as quantize_groups returns them.
    x_scales = float32(K // 128, M).t() if blockwise else float32(M, 1)
    w_scales = float32(_N // 128, K // 128) if blockwise else float32(_N, 1)
    return recorded(
        name,
        lambda: triton_gemm(
            tensor(e4m3, M, K),
            tensor(e4m3, _N, K),
            x_scales,
            w_scales,
            tensor(out, _N) if bias else None,
            tensor(out, M, _N),
            blockwise=blockwise,
            tile=tile,
        ),
        kernel=kernel,
        archs=FP8_ARCHS,
        expects_wgmma=kernel is _gemm_kernel and tile.block_m >= _WGMMA_ROWS,
    )
