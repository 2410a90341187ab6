"""Tuning of the grouped GEMM of a mixture of experts: shapes, and the tiles to try."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kernels.moe.gemm.tiles import MAX_BLOCK_K, as_moe_tile, file_name
from kernels.triton_common.tuned_tiles import MAX_FP8_BLOCK_K, Tile
from octavo.bench.tune.problem import Device

_BLOCK_M, _BLOCK_N, _BLOCK_K = (16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256)
_GROUP_M, _NUM_WARPS, _NUM_STAGES = (1, 8, 32), (4, 8), (2, 3, 4, 5)
# Float32 sums per thread, as for a plain GEMM (problem.py).
_MAX_SUMS_PER_THREAD = 64
# A block of rows belongs to one expert: beyond so many times the mean of its rows most of a block is padding.
_MOST_PADDING = 4


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
        for block_m, block_n, block_k, num_warps, num_stages, group_m in product(
            _BLOCK_M, _BLOCK_N, _BLOCK_K, _NUM_WARPS, _NUM_STAGES, _GROUP_M
        ):
            tile = Tile(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                group_m=group_m,
                num_warps=num_warps,
                num_stages=num_stages,
            )
            here = as_moe_tile(tile, is_fp8=self.is_fp8)
            columns = max(2 * here.gated_block_n, here.down_block_n)
            if block_k > self.max_block_k:
                continue
            if block_m > _BLOCK_M[0] and block_m > _MOST_PADDING * mean:
                continue
            if block_m * columns > _MAX_SUMS_PER_THREAD * 32 * num_warps:
                continue
            if num_stages * here.depth_bytes * (block_m + columns) > device.shared_memory:
                continue
            # With one block of rows an expert there is nothing to group.
            if group_m > 1 and mean <= block_m:
                continue
            # For e4m3, columns beyond a block of scales make the same down projection.
            found.setdefault(here, tile)
        return list(found.values())

    def flops(self, M: int) -> float:
        """Gate, up and down, of all pairs of a token and an expert."""
        return 6 * M * self.top_k * self.size * self.hidden_size
