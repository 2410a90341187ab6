"""How the grouped GEMM is cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTile:
    """Rows of a block, columns and depth of what one program has in shared memory at a time, and how it is launched."""

    block_m: int
    # Of the result. A gated program reads as many columns of gate and of up, so these are half of the other's.
    gated_block_n: int
    down_block_n: int
    # Bytes of K: 64 numbers of bf16, or 128 of e4m3, which share a scale.
    depth_bytes: int
    num_warps: int
    num_stages: int
    # So many blocks of rows are computed beside each other before the next columns: an expert's weights stay in L2.
    group_m: int


# Few rows an expert: time is the reading of weights. A stage has 18 KiB, so 3 programs of 4 stages are on an SM of
# Hopper, and each still fits an L40S. 16 rows are the least that tensor cores take.
FEW = MoeTile(block_m=16, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=4, num_stages=4, group_m=1)
# From 64 rows on there is wgmma; 24 KiB a stage.
SOME = MoeTile(block_m=64, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=4, num_stages=4, group_m=8)
# Two warp groups of 64 rows share what is read of the weights; 32 KiB a stage, of which 3 fit an L40S.
MANY = MoeTile(block_m=128, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=8, num_stages=3, group_m=8)
# Rows do not depend on the batch if the tile does not: one that serves decode steps and prefills.
INVARIANT = SOME


def tile_for(num_pairs: int, num_experts: int) -> MoeTile:
    """By the mean number of pairs of an expert."""
    mean = num_pairs / num_experts
    if mean <= FEW.block_m:
        return FEW
    return SOME if mean <= SOME.block_m else MANY
