"""Quantization of activations to e4m3, as a share of a copy's bandwidth."""

import torch

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.gemm.quantize import reference
from kernels.gemm.quantize import triton as gpu

_WAYS = ("tokens", "groups")


def run(report: Report, *, toy: bool) -> None:
    torch.manual_seed(0)
    for K in (300,) if toy else (4096, 28672):
        for M in token_counts(toy):
            x_MK = torch.randn(M, K, device=report.device, dtype=torch.bfloat16)
            for way in _WAYS:
                _way(report, f"{M} x {K}", way, x_MK)


def _way(report: Report, case: str, way: str, x_MK: torch.Tensor) -> None:
    quantize = getattr(gpu, f"quantize_{way}")
    q_MK, scales = quantize(x_MK)
    expected_q, expected_scales = getattr(reference, f"quantize_{way}")(x_MK)
    report.check("fp8_quantize", f"{case} {way} scales", scales, expected_scales, rtol=0, atol=0)
    report.check("fp8_quantize", f"{case} {way}", q_MK, expected_q, rtol=0, atol=0)
    num_bytes = num_bytes_of(x_MK, q_MK, scales)
    measure(report, "fp8_quantize", case, way, num_bytes, lambda: quantize(x_MK))
