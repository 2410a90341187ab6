"""How the grouped GEMM ships: every tile, gated and not, in bf16 and e4m3."""

from kernels.moe.gemm.tiles import FEW, MANY, SOME, MoeTile
from kernels.moe.gemm.triton import _COMBINE_TILE, _COMBINE_WARPS, _combine_kernel, _grouped_gemm_kernel
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild

_TOP_K = 8


def shipped() -> list[KernelBuild]:
    gemms = [
        _gemm(f"{'gate-up' if gated else 'down'}-{'fp8' if is_fp8 else 'bf16'}-{name}", tile, gated, is_fp8)
        for name, tile in (("few", FEW), ("some", SOME), ("many", MANY))
        for gated in (True, False)
        for is_fp8 in (False, True)
    ]
    combine = {"down_NH": "*bf16", "weights_TK": "*fp32", "experts_TK": "*i32", "out_TH": "*bf16", "hidden_size": "i32"}
    return [
        *gemms,
        KernelBuild(
            name="combine",
            fn=_combine_kernel,
            signature=combine,
            constexprs={"TOP_K": _TOP_K, "TILE": _COMBINE_TILE},
            num_warps=_COMBINE_WARPS,
            num_stages=3,
            multiples_of_16=("hidden_size",),
        ),
    ]


def _gemm(name: str, tile: MoeTile, gated: bool, is_fp8: bool) -> KernelBuild:
    operand = "*fp8e4nv" if is_fp8 else "*bf16"
    signature = {
        "x": operand,
        "weight": operand,
        "out": "*bf16",
        "pairs_BM": "*i32",
        "block_experts_B": "*i32",
        "num_blocks": "i32",
        "N": "i32",
        "K": "i32",
        "x_scale_row_stride": "i32",
        "x_scale_group_stride": "i32",
    }
    absent: dict[str, None] = {}
    if is_fp8:
        signature |= {"x_scales": "*fp32", "weight_scales": "*fp32"}
    else:
        absent = {"x_scales": None, "weight_scales": None}
    return KernelBuild(
        name=name,
        fn=_grouped_gemm_kernel,
        signature=signature,
        constexprs={
            **absent,
            "TOP_K": _TOP_K if gated else 1,
            "GATED": gated,
            "IS_FP8": is_fp8,
            "EVEN_K": True,
            "GROUP_M": tile.group_m,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.gated_block_n if gated else tile.down_block_n,
            "BLOCK_K": tile.depth_bytes // (1 if is_fp8 else 2),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=("N", "K"),
        expects_wgmma=tile.block_m >= 64,
        archs=FP8_ARCHS if is_fp8 else ARCHS,
    )
