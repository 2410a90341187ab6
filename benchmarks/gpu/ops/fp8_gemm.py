"""FP8 GEMM on the shapes of Llama-3.1 and DeepSeek-V3: our Triton kernel and torch's scaled_mm beside bf16.

`chosen` is 1 for the path that fp8_gemm takes by itself, `over_bf16` how many times as fast as torch's bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.report import Report
from kernels.gemm.fp8.choose import Path
from kernels.gemm.fp8.dispatch import fp8_gemm, fp8_gemm_choice
from kernels.gemm.quantize.reference import GROUP, spread
from kernels.gemm.quantize.triton import quantize_blocks, quantize_groups, quantize_tokens

# Time for one batch size: some seven kernels, half of them compiled.
_SECONDS = 8.0
# Outputs and inputs.
_LAYERS = (
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 28672, 4096),
    ("8B down", 4096, 14336),
    ("70B gate_up", 57344, 8192),
    ("70B down", 8192, 28672),
    ("V3 q_a kv_a", 2112, 7168),
    ("V3 q_b", 24576, 1536),
    ("V3 o", 7168, 16384),
    ("V3 shared gate_up", 4096, 7168),
)
_BATCH_SIZES = (1, 16, 64, 256, 4096)

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Way:
    name: str
    call: Callable[[], torch.Tensor]
    # Computed from the quantized operands without rounding in between.
    expected: torch.Tensor
    chosen: bool


def run(report: Report, *, toy: bool) -> None:
    torch.manual_seed(0)
    for name, N, K in (("toy", 130, 300),) if toy else _LAYERS:
        weight_NK = torch.randn(N, K, device=report.device, dtype=torch.bfloat16)
        blocks, channels = quantize_blocks(weight_NK), quantize_tokens(weight_NK)
        for M in (3,) if toy else _BATCH_SIZES:
            case = f"{name} {N}x{K}, M={M}"
            if not report.has_time(_SECONDS):
                report.skip("fp8_gemm", case, "no time left")
                continue
            _batch(report, case, M, weight_NK, blocks, channels)


def _batch(
    report: Report,
    case: str,
    M: int,
    weight_NK: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    channels: tuple[torch.Tensor, torch.Tensor],
) -> None:
    N, K = weight_NK.shape
    x_MK = torch.randn(M, K, device=report.device, dtype=torch.bfloat16)
    x_groups, x_tokens = quantize_groups(x_MK), quantize_tokens(x_MK)
    ways = [
        _Way("bf16", lambda: F.linear(x_MK, weight_NK), x_MK.float() @ weight_NK.float().t(), False),
        *_fp8_ways("block", (x_groups[0], blocks[0], x_groups[1], blocks[1])),
        *_fp8_ways("channel", (x_tokens[0], channels[0], x_tokens[1], channels[1])),
    ]
    for way in ways:
        # Outputs are sums of K products of size 1; each way rounds their last digits differently.
        report.check("fp8_gemm", f"{case} {way.name}", way.call(), way.expected, rtol=2**-7, atol=2e-3 * K**0.5)
    bf16 = float("nan")
    for way in ways:
        milliseconds = report.milliseconds(way.call)
        bf16 = milliseconds if way.name == "bf16" else bf16
        weight_bytes = N * K * (2 if way.name == "bf16" else 1)
        report.row(
            "fp8_gemm",
            case,
            way.name,
            milliseconds,
            tflops=2 * M * N * K / milliseconds / 1e9,
            share_of_copy=report.share_of_copy(weight_bytes, milliseconds),
            over_bf16=bf16 / milliseconds,
            chosen=float(way.chosen),
        )


def _fp8_ways(scales: str, operands: Operands) -> list[_Way]:
    choice = fp8_gemm_choice(*operands)
    expected = _expected(scales, operands)
    ways = [_Way(f"{scales} triton", _call(operands, "triton"), expected, choice.path == "triton")]
    try:
        _call(operands, "scaled_mm")()
    except ValueError:
        # scaled_mm does not take this shape, or there is no GPU; then the choice is not scaled_mm, either.
        return ways
    return [*ways, _Way(f"{scales} scaled_mm", _call(operands, "scaled_mm"), expected, choice.path == "scaled_mm")]


def _call(operands: Operands, path: Path) -> Callable[[], torch.Tensor]:
    return lambda: fp8_gemm(*operands, path=path)


def _expected(scales: str, operands: Operands) -> torch.Tensor:
    x, weight, x_scales, weight_scales = operands
    if scales == "block":
        x_scales = spread(x_scales, (1, GROUP), (x.shape[0], x.shape[1]))
        weight_scales = spread(weight_scales, (GROUP, GROUP), (weight.shape[0], weight.shape[1]))
    return (x.float() * x_scales) @ (weight.float() * weight_scales).t()
