"""Chooses the implementation of an FP8 GEMM and its tiles, and gives the reason.

The thresholds and the tiles up to 64 rows are measured on an H200 (docs/gpu.md); `python -m benchmarks.gpu.run_all`
prints both paths.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from kernels.gemm.fp8.scaled_mm import cuda_version, is_available, shape_obstacle
from kernels.gemm.quantize.reference import GROUP
from kernels.triton_common.tuned_tiles import Tile

Path = Literal["auto", "triton", "scaled_mm"]
PATHS: tuple[Path, ...] = ("auto", "triton", "scaled_mm")

# Below this, reading the weights is the limit, and the Triton kernel splits K for that: at 64 rows of Llama-3.1-8B's
# layers its best tile takes 0.67 to 0.98 of scaled_mm's time, at 256 it takes 1.17 to 1.74 of it.
SCALED_MM_MIN_ROWS = 65

# One tile for every M, so that the same instructions add up a row in the same order in every batch. 64 rows are the
# fewest that wgmma takes; more rows would be wasted work in decodes.
BATCH_INVARIANT_TILE = Tile(block_m=64, block_n=128, block_k=128, group_m=16, num_warps=4, num_stages=3)

# Tiles where nothing is tuned, each with the largest M it is for. Of the 24 to 27 tiles measured on an H200 for the
# layers of Llama-3.1-8B, the first two are within 1% and 3% of the best of each layer at M = 16 and 64, by their
# geometric means. _LARGEST_TILE is the one that vLLM publishes for an H200 at N = 12288, K = 7168 and M from 256 to
# 3072; from SCALED_MM_MIN_ROWS on it is scaled_mm's turn where that can.
_DEFAULT_TILES = (
    (16, Tile(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)),
    (128, Tile(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4)),
)
_LARGEST_TILE = Tile(block_m=64, block_n=128, block_k=128, group_m=16, num_warps=4, num_stages=3)

# So many programs an SM have enough loads in flight to hide HBM's latency: four with tiles of 16 rows, two with larger
# ones. A part of K should still be long enough to fill the stages.
_FEW_ROWS, _PROGRAMS_OF_FEW_ROWS, _PROGRAMS_PER_SM = 16, 4, 2
_MIN_PART_OF_K, _MAX_SPLIT_K = 1024, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The properties of a device that the choice depends on."""

    # Compute capability, 90 for Hopper; 0: no GPU, Triton interprets.
    capability: int
    num_sms: int
    # CUDA's name of the device, part of the names of tuned files.
    name: str
    # The version that torch was built with.
    cuda_version: tuple[int, ...]
    has_scaled_mm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The properties of a GEMM that the choice depends on."""

    M: int
    N: int
    K: int
    blockwise: bool
    out_dtype: torch.dtype
    has_bias: bool
    # True if the scales of groups are M-major.
    scales_are_m_major: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    path: Literal["triton", "scaled_mm"]
    reason: str


@lru_cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(capability=0, num_sms=1, name="interpreter", cuda_version=cuda_version(), has_scaled_mm=False)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        capability=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        name=properties.name,
        cuda_version=cuda_version(),
        has_scaled_mm=is_available(),
    )


def choose_path(problem: Problem, device: Device, *, batch_invariant: bool) -> Choice:
    """Chooses Triton or scaled_mm, and gives the reason in words."""
    if batch_invariant:
        return Choice(path="triton", reason="batch_invariant: one tile for every M; scaled_mm chooses its kernel by M")
    against = obstacle(problem, device)
    if against is not None:
        return Choice(path="triton", reason=f"scaled_mm does not take it: {against}")
    if problem.M < SCALED_MM_MIN_ROWS:
        return Choice(path="triton", reason=f"M={problem.M} is below {SCALED_MM_MIN_ROWS}: bound by reading weights")
    return Choice(path="scaled_mm", reason=f"M={problem.M} is {SCALED_MM_MIN_ROWS} or more: bound by tensor cores")


def obstacle(problem: Problem, device: Device) -> str | None:
    """The reason why scaled_mm cannot compute a problem; None if it can."""
    if device.capability == 0:
        return "there is no GPU"
    if not device.has_scaled_mm:
        return "this torch has no torch.nn.functional.scaled_mm"
    if problem.blockwise and (device.capability // 10 != 9 or device.cuda_version < (12, 9)):
        version = ".".join(map(str, device.cuda_version))
        return f"scales of blocks need sm_90 and CUDA 12.9, here are sm_{device.capability} and CUDA {version}"
    if problem.blockwise and not problem.scales_are_m_major:
        return "scales of groups have to be M-major, as quantize_groups makes them"
    if problem.has_bias and problem.out_dtype == torch.float32:
        return "a bias goes with outputs of bfloat16 and float16 only"
    return shape_obstacle(problem.M, problem.N, problem.K, blockwise=problem.blockwise)


def default_tile(M: int, N: int, K: int, num_sms: int) -> Tile:
    """The tile where nothing is tuned."""
    tile = next((tile for largest, tile in _DEFAULT_TILES if largest >= M), _LARGEST_TILE)
    return with_parts_of_k(tile, M, N, K, num_sms)


def with_parts_of_k(tile: Tile, M: int, N: int, K: int, num_sms: int) -> Tile:
    """Returns the tile with K split among more programs if the SMs need them. Depends on M: not batch-invariant."""
    programs = -(-M // tile.block_m) * -(-N // tile.block_n)
    most = num_sms * (_PROGRAMS_OF_FEW_ROWS if tile.block_m <= _FEW_ROWS else _PROGRAMS_PER_SM)
    split = 1
    while split < _MAX_SPLIT_K and programs * split * 2 <= most and K // (split * 2) >= max(_MIN_PART_OF_K, GROUP):
        split *= 2
    return Tile(
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        group_m=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        split_k=split,
    )
