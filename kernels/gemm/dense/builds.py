"""How the batch-invariant GEMM ships: both tiles, with K in one part, in parts of one program, and in parts of programs
of their own."""

from kernels.gemm.dense.triton import (
    _GROUP_M,
    _REDUCE_TILE,
    _REDUCE_WARPS,
    FEW,
    FLOAT32,
    MANY,
    GemmTile,
    _add_parts_kernel,
    _gemm_kernel,
)
from kernels.triton_common.kernel_build import KernelBuild

# Of all tiles, so that it makes no difference to a row which of them it is in. Before Hopper Triton has but one shape.
_WGMMA = "m64n128k16"


def shipped() -> list[KernelBuild]:
    return [
        _gemm("few-split", FEW, out="*fp32"),
        _gemm("few-fp16-bias-part-of-a-step", FEW, dtype="*fp16", bias=True, even_k=False),
        _gemm("many", MANY),
        _gemm("many-fold-bias", MANY, fold=True, bias=True),
        _gemm("float32-fold", FLOAT32, dtype="*fp32", fold=True),
        KernelBuild(
            name="add-parts-bias",
            fn=_add_parts_kernel,
            signature={
                "parts": "*fp32", "out": "*bf16", "bias": "*bf16", "M": "i32", "N": "i32", "out_stride": "i32",
            },
            constexprs={"PARTS": 4, "TILE": _REDUCE_TILE},
            num_warps=_REDUCE_WARPS,
            num_stages=3,
            multiples_of_16=("N", "out_stride"),
            expects_vectors=True,
        ),
    ]  # fmt: skip


def _gemm(
    name: str,
    tile: GemmTile,
    *,
    dtype: str = "*bf16",
    out: str = "",
    fold: bool = False,
    bias: bool = False,
    even_k: bool = True,
) -> KernelBuild:
    sizes = ("M", "N", "K", "x_stride", "w_stride", "out_stride", "part_steps")
    is_16_bit = dtype != "*fp32"
    return KernelBuild(
        name=name,
        fn=_gemm_kernel,
        signature={
            "x": dtype,
            "w": dtype,
            "out": out or dtype,
            **({"bias": dtype} if bias else {}),
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            **({} if bias else {"bias": None}),
            "FOLD": fold,
            "EVEN_K": even_k,
            "GROUP_M": _GROUP_M,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=("N", "K", "x_stride", "w_stride", "out_stride"),
        expects_wgmma=is_16_bit,
        wgmma_shape=_WGMMA if is_16_bit else "",
    )
