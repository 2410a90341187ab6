"""Times tiles on one GPU: `python -m octavo.bench.tune.measure` answers questions, one line of JSON each.

    {"op": "fp8_gemm", "M": 16, "shape": {"N": .., "K": .., "blockwise": true}, "tile": {"BLOCK_SIZE_M": ..}}
    {"microseconds": 12.5, "error": "", "is_last": false}

is_last: this process can no longer use the GPU and ends. An empty question is answered once the process is ready.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import triton

from kernels.gemm.fp8.dispatch import fp8_gemm
from kernels.gemm.quantize.reference import GROUP, spread
from kernels.gemm.quantize.triton import quantize_blocks, quantize_groups, quantize_tokens
from kernels.triton_common.tuned_tiles import Tile, tile_from_json
from octavo.bench.tune.expert_case import expert_case
from octavo.bench.tune.experts import ExpertsShape
from octavo.bench.tune.problem import Shape

# Largest error over the largest output: bfloat16 rounds by 2^-9 of a number, sums of e4m3 products add less.
_TOLERANCE = 2**-7
# Milliseconds. A slow tile shows in few calls.
_WARM_UP, _MEASURED = 5, 30


class Case(Protocol):
    """One batch of what is tuned. tolerance: largest error over the largest output."""

    @property
    def expected(self) -> torch.Tensor: ...

    @property
    def tolerance(self) -> float: ...

    def compute(self, tile: Tile) -> torch.Tensor: ...


@dataclass(frozen=True)
class GemmCase:
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    expected: torch.Tensor
    tolerance: float = _TOLERANCE

    def compute(self, tile: Tile) -> torch.Tensor:
        return fp8_gemm(*self.arguments, path="triton", tile=tile)


def time_on_gpu(call: Callable[[], object]) -> float:
    """Median milliseconds of a call with a cold L2 cache, which is what a model's next layer finds."""
    return float(triton.testing.do_bench(call, warmup=_WARM_UP, rep=_MEASURED, return_mode="median"))  # pyright: ignore[reportArgumentType]


def answer(question: dict[str, Any], *, device: str, timer: Callable[[Callable[[], object]], float]) -> dict[str, Any]:
    """Computes once, compares with the reference, then times. timer: returns the milliseconds of a call."""
    shape = (ExpertsShape if question["op"] == "moe_gemm" else Shape)(**question["shape"])
    tile = tile_from_json(question["tile"], max_block_k=shape.max_block_k)
    try:
        case = _case(question["M"], shape, device)
        error = _error(case, tile)
        if error > case.tolerance:
            return _answer(None, f"wrong by {error:.2g} of the largest output", is_last=False)
        milliseconds = timer(lambda: case.compute(tile))
    except Exception as failure:  # noqa: BLE001 - any failure of compiler or GPU is the tile's result
        # After an illegal access, CUDA no longer works in this process.
        is_last = isinstance(failure, RuntimeError) and "CUDA" in str(failure)
        return _answer(None, f"{type(failure).__name__}: {str(failure)[:500]}", is_last=is_last)
    return _answer(milliseconds * 1e3, "", is_last=False)


def _answer(microseconds: float | None, error: str, *, is_last: bool) -> dict[str, Any]:
    return {"microseconds": microseconds, "error": error, "is_last": is_last}


def _error(case: Case, tile: Tile) -> float:
    y = case.compute(tile).float()
    worst = (y - case.expected).abs().max() / case.expected.abs().max()
    return float(worst.nan_to_num(torch.inf))


# One entry is enough: all tiles of a batch size are tried in a row.
@lru_cache(maxsize=1)
def _case(M: int, shape: Shape | ExpertsShape, device: str) -> Case:
    return expert_case(M, shape, device) if isinstance(shape, ExpertsShape) else _gemm_case(M, shape, device)


def _gemm_case(M: int, shape: Shape, device: str) -> GemmCase:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(M, shape.K, generator=generator, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.N, shape.K, generator=generator, device=device, dtype=torch.bfloat16)
    if shape.blockwise:
        (q_x, x_scales), (q_weight, weight_scales) = quantize_groups(x), quantize_blocks(weight)
        x_spread = spread(x_scales, (1, GROUP), (M, shape.K))
        weight_spread = spread(weight_scales, (GROUP, GROUP), (shape.N, shape.K))
    else:
        (q_x, x_scales), (q_weight, weight_scales) = quantize_tokens(x), quantize_tokens(weight)
        x_spread, weight_spread = x_scales, weight_scales
    expected = (q_x.float() * x_spread) @ (q_weight.float() * weight_spread).t()
    return GemmCase(arguments=(q_x, q_weight, x_scales, weight_scales), expected=expected)


def main() -> int:
    torch.cuda.init()
    for line in sys.stdin:
        question = json.loads(line)
        reply = answer(question, device="cuda", timer=time_on_gpu) if question else {}
        print(json.dumps(reply), flush=True)
        if reply.get("is_last"):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
