"""The gated activation, quantized or not, beside PyTorch's two ops."""

import torch
import torch.nn.functional as F

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.elementwise.silu_mul import reference
from kernels.elementwise.silu_mul.triton import silu_mul, silu_mul_quantize_groups, silu_mul_quantize_tokens


def run(report: Report, *, toy: bool) -> None:
    for size in (300,) if toy else (3072, 14336):
        for num_tokens in token_counts(toy):
            _sizes(report, num_tokens, size)


def _sizes(report: Report, num_tokens: int, size: int) -> None:
    case = f"{num_tokens} x {size}"
    gate_up = torch.randn(num_tokens, 2 * size, device=report.device).bfloat16()
    expected = reference.silu_mul(gate_up[:3].cpu())
    report.check("silu_mul", case, silu_mul(gate_up[:3]), expected, rtol=2**-7.9, atol=1e-6)
    q, scales = silu_mul_quantize_tokens(gate_up[:3])
    # e4m3 keeps 3 bits: its error is 2^-4 at most, or half of its smallest number.
    report.check(
        "silu_mul", f"{case} e4m3", q.float() * scales, expected, rtol=2**-3.9, atol=2**-9 * float(scales.max())
    )

    plain = num_bytes_of(gate_up) * 3 // 2
    quantized = num_bytes_of(gate_up) + gate_up.numel() // 2
    measure(report, "silu_mul", case, "plain", plain, lambda: silu_mul(gate_up))
    measure(report, "silu_mul", case, "torch", plain, lambda: F.silu(gate_up[:, :size]) * gate_up[:, size:])
    measure(report, "silu_mul", case, "tokens", quantized, lambda: silu_mul_quantize_tokens(gate_up))
    measure(report, "silu_mul", case, "groups", quantized, lambda: silu_mul_quantize_groups(gate_up))
