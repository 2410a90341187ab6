"""Defines tuning problems: the shapes, the device and the tiles to try.

The tiles are those that vLLM's tuner tries, minus those that cannot be the fastest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol

from kernels.gemm.fp8.choose import with_parts_of_k
from kernels.gemm.fp8.tuned_files import file_name as gemm_file_name
from kernels.moe.gemm.tiles import MAX_BLOCK_K, as_moe_tile, file_name
from kernels.triton_common.tuned_tiles import MAX_FP8_BLOCK_K, Tile


class Problem(Protocol):
    """The shapes of an op to tune, for batches of any size."""

    @property
    def op(self) -> str:
        """The op's name, as --tune takes it."""
        ...

    @property
    def sizes(self) -> Mapping[str, int | str]:
        """The sizes, by their names in output."""
        ...

    @property
    def flag(self) -> str:
        """The value of --shape."""
        ...

    def fields(self) -> dict[str, Any]:
        """Arguments from which the measuring process makes it again."""
        ...

    @property
    def max_block_k(self) -> int: ...

    def file_name(self, device_name: str) -> str: ...

    def candidates(self, M: int, device: "Device") -> list[Tile]:
        """The tiles to try for a batch of M tokens, in a fixed order."""
        ...

    def flops(self, M: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A linear layer: N outputs, K inputs; scales per 128 x 128 block, or per token and channel."""

    N: int
    K: int
    blockwise: bool

    @property
    def op(self) -> str:
        return "fp8_gemm"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"N": self.N, "K": self.K, "scales": "block" if self.blockwise else "channel"}

    @property
    def flag(self) -> str:
        return f"{self.N},{self.K}"

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def max_block_k(self) -> int:
        return MAX_FP8_BLOCK_K

    def file_name(self, device_name: str) -> str:
        return gemm_file_name(self.N, self.K, device_name, blockwise=self.blockwise)

    def candidates(self, M: int, device: "Device") -> list[Tile]:
        return candidates(M, self, device)

    def flops(self, M: int) -> float:
        return 2 * M * self.N * self.K


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The GPUs that share the work, all of one kind."""

    name: str
    num_gpus: int
    num_sms: int
    # Bytes that one program may use.
    shared_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of one tile for one batch size."""

    # Median of one call; None if the tile failed.
    microseconds: float | None
    # Why it failed: the GPU has no room for the tile, or its results are wrong.
    error: str = ""


# The batch sizes in the files published for vLLM.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)

# Blocks of M, N and K, and groups: of a plain GEMM, and of experts.
_GEMM = ((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128), (1, 16, 32, 64))
_EXPERTS = ((16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256), (1, 8, 32))
_NUM_WARPS, _NUM_STAGES = (4, 8), (2, 3, 4, 5)
# Up to this many rows, a tile with more rows than the batch can still pay off: Hopper multiplies 64 rows at once.
_WGMMA_ROWS = 64
# Float32 sums per thread. 128 x 128 at 4 warps needs 128, and twice that where sums are promoted: that spills.
_MAX_SUMS_PER_THREAD = 64
# A block of rows belongs to one expert: beyond so many times the mean of its rows most of a block is padding.
_MOST_PADDING = 4


def _tiles(sizes: tuple[tuple[int, ...], ...]) -> Iterator[Tile]:
    block_m, block_n, block_k, group_m = sizes
    for m, n, k, num_warps, num_stages, group in product(block_m, block_n, block_k, _NUM_WARPS, _NUM_STAGES, group_m):
        yield Tile(block_m=m, block_n=n, block_k=k, group_m=group, num_warps=num_warps, num_stages=num_stages)


def _fits(tile: Tile, columns: int, depth_bytes: int, device: Device) -> bool:
    """True if neither registers spill nor shared memory is short. depth_bytes: of a row or column in one stage."""
    return (
        tile.block_m * columns <= _MAX_SUMS_PER_THREAD * 32 * tile.num_warps
        and tile.num_stages * depth_bytes * (tile.block_m + columns) <= device.shared_memory
    )


def candidates(M: int, shape: Shape, device: Device) -> list[Tile]:
    """The tiles to try, in a fixed order."""
    found: list[Tile] = []
    for tile in _tiles(_GEMM):
        if tile.block_m > _WGMMA_ROWS and tile.block_m >= 2 * M:
            continue
        # One row of tiles has nothing to group.
        if tile.group_m > 1 and tile.block_m >= M:
            continue
        if _fits(tile, tile.block_n, tile.block_k, device):
            # Where programs are few, also try K split among more programs.
            found += dict.fromkeys((tile, with_parts_of_k(tile, M, shape.N, shape.K, device.num_sms)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """num_experts: this rank's, each an MLP of `size`; a token goes to top_k of them. is_fp8: e4m3 in blocks of 128 x
    128, otherwise bf16."""

    num_experts: int
    size: int
    hidden_size: int
    top_k: int
    is_fp8: bool

    @property
    def op(self) -> str:
        return "moe_gemm"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {
            "E": self.num_experts,
            "N": self.size,
            "H": self.hidden_size,
            "top_k": self.top_k,
            "scales": "block" if self.is_fp8 else "none",
        }

    @property
    def flag(self) -> str:
        return f"{self.num_experts},{self.size},{self.hidden_size},{self.top_k}"

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def max_block_k(self) -> int:
        return MAX_FP8_BLOCK_K if self.is_fp8 else MAX_BLOCK_K

    def file_name(self, device_name: str) -> str:
        return file_name(self.num_experts, self.size, device_name, is_fp8=self.is_fp8)

    def candidates(self, M: int, device: Device) -> list[Tile]:
        """Those of vLLM's tuner, without such that do not fit, or would mostly compute padding."""
        found: dict[object, Tile] = {}
        mean = M * self.top_k / self.num_experts
        for tile in _tiles(_EXPERTS):
            here = as_moe_tile(tile, is_fp8=self.is_fp8)
            if tile.block_k > self.max_block_k:
                continue
            if tile.block_m > _EXPERTS[0][0] and tile.block_m > _MOST_PADDING * mean:
                continue
            # With one block of rows an expert there is nothing to group.
            if tile.group_m > 1 and mean <= tile.block_m:
                continue
            if _fits(tile, max(2 * here.gated_block_n, here.down_block_n), here.depth_bytes, device):
                # For e4m3, columns beyond a block of scales make the same down projection.
                found.setdefault(here, tile)
        return list(found.values())

    def flops(self, M: int) -> float:
        """Gate, up and down, of all pairs of a token and an expert."""
        return 6 * M * self.top_k * self.size * self.hidden_size
