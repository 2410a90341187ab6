"""How block copy ships: it knows words only, so once."""

from kernels.block_copy import gpu
from kernels.tiles.build import KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        KernelBuild(
            name="words",
            fn=gpu._block_copy_kernel,
            signature={"addresses_L": "*i64", "pairs_C2": "*i64", "block_words": "i32", "num_tiles": "i32"},
            constexprs={"TILE": gpu._TILE},
            num_warps=gpu._NUM_WARPS,
            num_stages=3,
            expects_vectors=True,
            multiples_of_16=("block_words",),
        )
    ]
