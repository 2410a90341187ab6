"""How the GEMM ships: default tiles, the one of batch_invariant, and what a tuned configuration may add.

128 x 128 x 128 with scales of blocks spills at 4 warps (255 registers, 216 bytes of stack), and does not at 8.
"""

from kernels.gemm.fp8 import triton as triton_gemm
from kernels.gemm.fp8.choose import BATCH_INVARIANT_TILE, default_tile
from kernels.triton_common.kernel_build import FP8_ARCHS, KernelBuild
from kernels.triton_common.tuned_tiles import Tile

_POINTERS = {"x": "*fp8e4nv", "w": "*fp8e4nv", "x_scales": "*fp32", "w_scales": "*fp32"}
_SIZES = ("M", "N", "K", "x_stride", "w_stride", "out_stride", "x_scale_row_stride", "x_scale_group_stride",
          "w_scale_row_stride", "group_m")  # fmt: skip
_WGMMA_ROWS = 64


def shipped() -> list[KernelBuild]:
    builds = [
        _gemm(f"{scales}-{M}-rows", default_tile(M, 1 << 20, 4096, 132), blockwise=scales == "block")
        for scales in ("block", "channel")
        for M in (16, 32, 128, 4096)
    ]
    wide = Tile(block_m=128, block_n=128, block_k=128, group_m=16, num_warps=8, num_stages=3)
    return [
        *builds,
        _gemm("block-batch-invariant", BATCH_INVARIANT_TILE, blockwise=True),
        _gemm("block-tuned-wide", wide, blockwise=True),
        _gemm("channel-tuned-wide", wide, blockwise=False),
        _gemm("block-split-k", default_tile(16, 4096, 4096, 132), blockwise=True, out="fp32"),
        _gemm("block-fp16-bias", default_tile(16, 1 << 20, 4096, 132), blockwise=True, out="fp16", bias=True),
        _gemm("channel-odd-k", default_tile(16, 1 << 20, 4096, 132), blockwise=False, even_k=False),
        _reduce("reduce-block", blockwise=True),
        _reduce("reduce-channel-bias", blockwise=False, bias=True),
    ]


def _gemm(
    name: str, tile: Tile, *, blockwise: bool, out: str = "bf16", bias: bool = False, even_k: bool = True
) -> KernelBuild:
    return KernelBuild(
        name=name,
        fn=triton_gemm._gemm_kernel,
        signature={
            **_POINTERS, "out": f"*{out}", "bias": f"*{out if bias else 'fp32'}", **dict.fromkeys(_SIZES, "i32")
        },
        constexprs={
            "BLOCKWISE": blockwise, "HAS_BIAS": bias, "SPLIT_K": tile.split_k, "EVEN_K": even_k,
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=("N", "K", "x_stride", "w_stride", "out_stride"),
        expects_wgmma=tile.block_m >= _WGMMA_ROWS,
        archs=FP8_ARCHS,
    )  # fmt: skip


def _reduce(name: str, *, blockwise: bool, bias: bool = False) -> KernelBuild:
    sizes = ("M", "N", "out_stride", "x_scale_row_stride", "w_scale_row_stride")
    return KernelBuild(
        name=name,
        fn=triton_gemm._reduce_kernel,
        signature={
            "parts": "*fp32", "out": "*bf16", "x_scales": "*fp32", "w_scales": "*fp32", "bias": "*bf16",
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={"BLOCKWISE": blockwise, "HAS_BIAS": bias, "SPLIT_K": 4, "TILE": 1024},
        num_warps=4,
        num_stages=3,
        multiples_of_16=("N", "out_stride"),
        archs=FP8_ARCHS,
    )  # fmt: skip
