"""Defines a tuning problem: the shapes, the device and the tiles to try.

The tiles are those that vLLM's tuner tries, minus those that cannot be the fastest.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol

from configs.load import ConfigError
from kernels.gemm.fp8.choose import with_parts_of_k
from kernels.gemm.fp8.tuned_files import file_name as gemm_file_name
from kernels.triton_common.tuned_tiles import MAX_FP8_BLOCK_K, Tile


class TuneError(ConfigError):
    """An error that stops a tuning run; the message names the option or file, the value seen and what would work."""


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

_BLOCK_M, _BLOCK_N, _BLOCK_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128)
_GROUP_M, _NUM_WARPS, _NUM_STAGES = (1, 16, 32, 64), (4, 8), (2, 3, 4, 5)
# Up to this many rows, a tile with more rows than the batch can still pay off: Hopper multiplies 64 rows at once.
_WGMMA_ROWS = 64
# Float32 sums per thread. 128 x 128 at 4 warps needs 128, and twice that where sums are promoted: that spills.
_MAX_SUMS_PER_THREAD = 64


def candidates(M: int, shape: Shape, device: Device) -> list[Tile]:
    """The tiles to try, in a fixed order."""
    tiles = []
    for block_m, block_n, block_k, num_warps, num_stages in product(
        _BLOCK_M, _BLOCK_N, _BLOCK_K, _NUM_WARPS, _NUM_STAGES
    ):
        if block_m > _WGMMA_ROWS and block_m >= 2 * M:
            continue
        if block_m * block_n > _MAX_SUMS_PER_THREAD * 32 * num_warps:
            continue
        if num_stages * block_k * (block_m + block_n) > device.shared_memory:
            continue
        # One row of tiles has nothing to group.
        for group_m in _GROUP_M if block_m < M else (1,):
            tile = Tile(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                group_m=group_m,
                num_warps=num_warps,
                num_stages=num_stages,
            )
            # Where programs are few, also try K split among more programs.
            tiles += dict.fromkeys((tile, with_parts_of_k(tile, M, shape.N, shape.K, device.num_sms)))
    return tiles
