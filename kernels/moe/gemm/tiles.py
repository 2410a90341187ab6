"""Tiles of the grouped GEMM: defaults, and tuned ones from files with the names and format of vLLM's fused_moe.

`E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json` is for 128 experts of size 768 on one
rank, with block-quantized weights; bf16 and fp16 files have neither dtype nor block_shape. A file maps numbers of
tokens to tiles; a batch gets the tile of the nearest number. The first folder that has the file is used: the one given,
$OCTAVO_TUNED_CONFIG_FOLDER, moe_gemm/ in the cache directory.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernels.triton_common.tuned_tiles import (
    FOLDER_VARIABLE,
    MAX_FP8_BLOCK_K,
    Tile,
    TunedConfigError,
    find_file,
    first_folder,
    nearest,
    read_tiles,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTile:
    """Rows of a block, columns and depth of a program's tile in shared memory, and its launch parameters."""

    block_m: int
    # Columns of the result. A gated program reads as many columns of both gate and up, so it has half of the other's.
    gated_block_n: int
    down_block_n: int
    # Bytes of K: 64 numbers of bf16, or 128 of e4m3, which share a scale.
    depth_bytes: int
    num_warps: int
    num_stages: int
    # Blocks of rows computed before the next columns, so that an expert's weights stay in L2.
    group_m: int


# For few rows an expert, where the time is that of reading weights. A stage has 18 KiB, so an SM of Hopper holds 3
# programs of 4 stages, and each still fits an L40S. 16 rows are the fewest that tensor cores take.
FEW = MoeTile(block_m=16, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=4, num_stages=4, group_m=1)
# From 64 rows on, wgmma works; 24 KiB a stage.
SOME = MoeTile(block_m=64, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=4, num_stages=4, group_m=8)
# Two warp groups of 64 rows share the weights they read; 32 KiB a stage, of which 3 fit an L40S.
MANY = MoeTile(block_m=128, gated_block_n=64, down_block_n=128, depth_bytes=128, num_warps=8, num_stages=3, group_m=8)
# A row does not depend on the batch if the tile does not. This one serves both decode steps and prefills.
INVARIANT = SOME


def tile_for(num_pairs: int, num_experts: int) -> MoeTile:
    """Chooses by the mean number of pairs per expert."""
    mean = num_pairs / num_experts
    if mean <= FEW.block_m:
        return FEW
    return SOME if mean <= SOME.block_m else MANY


# Columns of a block-quantized weight that share a scale: a tile reads a single scale.
_MAX_FP8_BLOCK_N = 128
# The fewest columns that tensor cores take in Triton.
_MIN_BLOCK_N = 16
MAX_BLOCK_K = 256

logger = logging.getLogger("octavo.kernels")


def file_name(num_experts: int, size: int, device_name: str, *, is_fp8: bool) -> str:
    """num_experts: this rank's. size: of an expert's MLP. device_name: CUDA's, such as "NVIDIA H200"."""
    dtype = ",dtype=fp8_w8a8,block_shape=[128,128]" if is_fp8 else ""
    return f"E={num_experts},N={size},device_name={device_name.replace(' ', '_')}{dtype}.json"


def tuned_tile(
    num_tokens: int, num_experts: int, size: int, device_name: str, *, is_fp8: bool, folder: str | Path | None = None
) -> MoeTile | None:
    """Returns the tile for num_tokens, or None where nothing is tuned; warns once for each missing file.

    Raises TunedConfigError for a malformed file.
    """
    tiles = _tiles(num_experts, size, device_name, is_fp8, first_folder(folder))
    return None if tiles is None else as_moe_tile(nearest(num_tokens, tiles), is_fp8=is_fp8)


def as_moe_tile(tile: Tile, *, is_fp8: bool) -> MoeTile:
    """Converts vLLM's tile. vLLM computes gate and up as columns of one GEMM, and SiLU in a separate kernel. Here a
    gated program computes gate and up of a column, so half as many columns make a tile of the same size."""
    return MoeTile(
        block_m=tile.block_m,
        gated_block_n=max(_MIN_BLOCK_N, tile.block_n // 2),
        down_block_n=min(tile.block_n, _MAX_FP8_BLOCK_N) if is_fp8 else tile.block_n,
        depth_bytes=tile.block_k if is_fp8 else 2 * tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        group_m=tile.group_m,
    )


@lru_cache(maxsize=1024)
def _tiles(num_experts: int, size: int, device_name: str, is_fp8: bool, folder: str) -> Mapping[int, Tile] | None:
    name = file_name(num_experts, size, device_name, is_fp8=is_fp8)
    path = find_file(name, op="moe_gemm", folder=folder)
    if path is None:
        logger.warning(
            "no tuned configuration %s: default tiles are used (%s, by the number of pairs per expert), which may be "
            "slower; `octavo bench kernels --tune moe_gemm` makes one, and a file of that name made for vLLM is read "
            "from the folder that %s names",
            name,
            ", ".join(f"{tile.block_m} x {tile.down_block_n}" for tile in (FEW, SOME, MANY)),
            FOLDER_VARIABLE,
        )
        return None
    tiles = read_tiles(path, max_block_k=MAX_FP8_BLOCK_K if is_fp8 else MAX_BLOCK_K)
    for num_tokens, tile in tiles.items():
        if tile.split_k != 1:
            raise TunedConfigError(
                f"{path}: {num_tokens}: SPLIT_K={tile.split_k} does not work; it has to be 1 or left out"
            )
    return tiles
