"""How alignment ships: for 256 experts."""

from kernels.moe.align.triton import CHUNK, NUM_WARPS, STEP, _count_kernel, _place_kernel
from kernels.triton_common.kernel_build import KernelBuild


def shipped() -> list[KernelBuild]:
    sizes = {"BLOCK_E": 256, "CHUNK": CHUNK, "STEP": STEP}
    pointers = {"experts_TK": "*i32", "counts_CE": "*i32", "pairs_BM": "*i32"}
    count = {**pointers, "num_pairs": "i32", "num_rows": "i32"}
    place = {**pointers, "block_experts_B": "*i32", "num_pairs": "i32", "num_blocks": "i32"}
    return [
        KernelBuild(
            name="count", fn=_count_kernel, signature=count, constexprs=sizes, num_warps=NUM_WARPS, num_stages=3
        ),
        KernelBuild(
            name="place",
            fn=_place_kernel,
            signature=place,
            constexprs={**sizes, "BLOCK_M": 64},
            num_warps=NUM_WARPS,
            num_stages=3,
        ),
    ]
