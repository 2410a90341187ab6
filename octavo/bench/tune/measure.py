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
from typing import Any

import torch
import triton

from kernels.gemm.fp8.dispatch import fp8_gemm
from kernels.gemm.quantize.reference import GROUP, spread
from kernels.gemm.quantize.triton import quantize_blocks, quantize_groups, quantize_tokens
from kernels.moe.gemm.tiles import as_moe_tile
from kernels.moe.gemm.triton import Experts, run_experts
from kernels.triton_common.tuned_tiles import Tile, tile_from_json
from octavo.bench.tune.problem import ExpertsShape, Shape

# Largest error over the largest output: bfloat16 rounds by 2^-9 of a number, sums of e4m3 products add less.
_TOLERANCE = 2**-7
# For experts, by is_fp8: bfloat16 rounds a number by 2^-9, in each of three places; e4m3 by 2^-4, where an input of the
# second GEMM falls on the other side of a step, which few of a sum do.
_EXPERT_TOLERANCES = {False: 2**-6, True: 2**-5}
# Milliseconds. A slow tile shows in few calls.
_WARM_UP, _MEASURED = 5, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch of what is tuned. expected: float32. tolerance: largest error over the largest output."""

    expected: torch.Tensor
    tolerance: float
    compute: Callable[[Tile], torch.Tensor]


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
    return _expert_case(M, shape, device) if isinstance(shape, ExpertsShape) else _gemm_case(M, shape, device)


def _gemm_case(M: int, shape: Shape, device: str) -> Case:
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
    return Case(
        expected=expected,
        tolerance=_TOLERANCE,
        compute=lambda tile: fp8_gemm(q_x, q_weight, x_scales, weight_scales, path="triton", tile=tile),
    )


def _expert_case(M: int, shape: ExpertsShape, device: str) -> Case:
    """Tokens go to top_k different experts each, drawn at random."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device, dtype=torch.float32)
        return (numbers * sizes[-1] ** -0.5).to(torch.bfloat16)

    count, size, hidden = shape.num_experts, shape.size, shape.hidden_size
    x_MH = random(M, hidden) * hidden**0.5
    gate_up, down = random(count, 2 * size, hidden), random(count, hidden, size)
    ranks_ME = torch.rand(M, count, generator=generator, device=device)
    weights_MK, experts_MK = ranks_ME.topk(shape.top_k)
    experts = Experts(gate_up_E2IH=gate_up, down_EHI=down)
    restored = [gate_up, down]
    rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    if shape.is_fp8:
        packed = [[quantize_blocks(each) for each in weight] for weight in restored]
        restored = [
            torch.stack([q.float() * spread(scales, (GROUP, GROUP), (q.shape[0], q.shape[1])) for q, scales in weight])
            for weight in packed
        ]
        (gate_up, gate_up_scales), (down, down_scales) = (
            map(torch.stack, zip(*weight, strict=True)) for weight in packed
        )
        experts = Experts(
            gate_up_E2IH=gate_up, down_EHI=down, gate_up_scales=gate_up_scales, down_scales=down_scales.contiguous()
        )
        rounded = _as_quantized
    expected = torch.zeros(M, hidden, device=device)
    for expert in range(count):
        tokens, places = (experts_MK == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = (rounded(x_MH[tokens].contiguous()) @ restored[0][expert].float().t()).chunk(2, dim=-1)
        gated = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        out = (rounded(gated.contiguous()) @ restored[1][expert].float().t()).to(torch.bfloat16).float()
        expected.index_add_(0, tokens, out * weights_MK[tokens, places, None].float())
    chosen = experts_MK.to(torch.int32)
    return Case(
        expected=expected,
        tolerance=_EXPERT_TOLERANCES[shape.is_fp8],
        compute=lambda tile: run_experts(
            x_MH, experts, weights_MK.float(), chosen, tile=as_moe_tile(tile, is_fp8=shape.is_fp8)
        ),
    )


def _as_quantized(x_MK: torch.Tensor) -> torch.Tensor:
    q, scales = quantize_groups(x_MK)
    return q.float() * spread(scales, (1, GROUP), (x_MK.shape[0], x_MK.shape[1]))


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
