"""The batch-invariant GEMM beside cuBLAS, on linears of Qwen3-0.6B and Llama-3.1-8B and 70B.

`of_cublas` is its speed over that of cuBLAS: the cost of batch_invariant for a linear.
"""

import torch

from benchmarks.gpu.report import Report
from kernels.gemm.dense import reference
from kernels.gemm.dense.triton import gemm

# Time for one batch size: three kernels, one of them compiled.
_SECONDS = 4.0
# Outputs and inputs.
_LAYERS = (
    ("0.6B qkv", 4096, 1024),
    ("0.6B down", 1024, 3072),
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 28672, 4096),
    ("8B down", 4096, 14336),
    ("8B head", 128256, 4096),
    ("70B down", 8192, 28672),
)
_BATCH_SIZES = (1, 16, 64, 256, 4096)


def run(report: Report, *, toy: bool) -> None:
    torch.manual_seed(0)
    for name, N, K in (("toy", 130, 1096),) if toy else _LAYERS:
        weight_NK = torch.randn(N, K, device=report.device, dtype=torch.bfloat16)
        # The same row in every batch: its result must have the same bits each time.
        x_K, y_N = torch.randn(K, device=report.device, dtype=torch.bfloat16), None
        for M in (3, 65) if toy else _BATCH_SIZES:
            case = f"{name} {N}x{K}, M={M}"
            if not report.has_time(_SECONDS):
                report.skip("gemm", case, "no time left")
                continue
            x_MK = torch.randn(M, K, device=report.device, dtype=torch.bfloat16)
            x_MK[-1] = x_K
            y_N = _batch(report, case, x_MK, weight_NK, y_N)


def _batch(
    report: Report, case: str, x_MK: torch.Tensor, weight_NK: torch.Tensor, y_N: torch.Tensor | None
) -> torch.Tensor:
    """Checks and times one batch; returns its last row's result. y_N: the bits that it must have, if known."""
    (M, K), N = x_MK.shape, len(weight_NK)
    expected = reference.gemm(x_MK[-1:], weight_NK[:4096])
    cublas = float("nan")
    for way in ("cublas", "invariant"):
        y_MN = gemm(x_MK, weight_NK, batch_invariant=way == "invariant")
        # Outputs are sums of K products of size 1.
        report.check("gemm", f"{case} {way}", y_MN[-1:, :4096], expected, rtol=2**-7, atol=2e-3 * K**0.5)
        milliseconds = report.milliseconds(lambda way=way: gemm(x_MK, weight_NK, batch_invariant=way == "invariant"))
        cublas = milliseconds if way == "cublas" else cublas
        report.row(
            "gemm",
            case,
            way,
            milliseconds,
            tflops=2 * M * N * K / milliseconds / 1e9,
            share_of_copy=report.share_of_copy(2 * N * K, milliseconds),
            of_cublas=cublas / milliseconds,
        )
    if y_N is not None:
        report.check("gemm", f"{case} same bits", y_MN[-1], y_N, rtol=0, atol=0)
    return y_MN[-1]
