"""RMS norm with the residual's addition, quantized or not, beside PyTorch's own norm."""

import torch
import torch.nn.functional as F

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.elementwise.rms_norm import reference
from kernels.elementwise.rms_norm.triton import (
    rms_norm,
    rms_norm_quantize_groups,
    rms_norm_quantize_tokens,
)

_EPS = 1e-5


def run(report: Report, *, toy: bool) -> None:
    for size in (576,) if toy else (1024, 4096, 7168):
        for num_tokens in token_counts(toy):
            _sizes(report, num_tokens, size)


def _sizes(report: Report, num_tokens: int, size: int) -> None:
    case = f"{num_tokens} x {size}"
    x, residual = (torch.randn(num_tokens, size, device=report.device).bfloat16() for _ in range(2))
    weight = torch.randn(size, device=report.device).bfloat16()
    expected = reference.rms_norm((x[:3] + residual[:3]).cpu(), weight.cpu(), _EPS)
    out = rms_norm(x[:3], weight, _EPS, residual_TN=residual[:3].clone())
    report.check("rms_norm", case, out, expected, rtol=2**-7.9, atol=1e-5)
    q, scales = rms_norm_quantize_tokens(x[:3], weight, _EPS, residual_TN=residual[:3].clone())
    # e4m3 keeps 3 bits: its error is 2^-4 at most, or half of its smallest number.
    report.check(
        "rms_norm", f"{case} e4m3", q.float() * scales, expected, rtol=2**-3.9, atol=2**-9 * float(scales.max())
    )

    # x and the residual are read, the residual and the result written.
    added, quantized = 4 * num_bytes_of(x), 3 * num_bytes_of(x) + x.numel()
    measure(report, "rms_norm", case, "plain", 2 * num_bytes_of(x), lambda: rms_norm(x, weight, _EPS))
    measure(report, "rms_norm", case, "torch", 2 * num_bytes_of(x), lambda: F.rms_norm(x, (size,), weight, _EPS))
    for way, num_bytes, op in (
        ("residual", added, rms_norm),
        ("residual, tokens", quantized, rms_norm_quantize_tokens),
        ("residual, groups", quantized, rms_norm_quantize_groups),
    ):
        measure(report, "rms_norm", case, way, num_bytes, lambda op=op: op(x, weight, _EPS, residual_TN=residual))
    # The residual as in layers: a float32 stream, of twice the bytes.
    stream = residual.float()
    num_bytes = added + 2 * num_bytes_of(x)
    measure(report, "rms_norm", case, "stream", num_bytes, lambda: rms_norm(x, weight, _EPS, residual_TN=stream))
