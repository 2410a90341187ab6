"""The GEMM with 4-bit weights beside cuBLAS with the same weights in bfloat16, on linears of Llama-3.1-8B and 70B.

`of_cublas` is its speed over that of cuBLAS: above 1 where reading weights takes the time.
"""

import torch

from benchmarks.gpu.report import Report
from kernels.gemm.dense.triton import gemm
from kernels.gemm.int4 import reference
from kernels.gemm.int4.layout import packed_for_gpu
from kernels.gemm.int4.triton import int4_gemm

# Time for one batch size: two kernels, one of them compiled.
_SECONDS = 4.0
# Outputs and inputs.
_LAYERS = (
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 28672, 4096),
    ("8B down", 4096, 14336),
    ("70B down", 8192, 28672),
)
_BATCH_SIZES = (1, 16, 64, 256, 4096)


def run(report: Report, *, toy: bool) -> None:
    torch.manual_seed(0)
    for name, N, K in (("toy", 130, 1096),) if toy else _LAYERS:
        groups = -(-K // 32)
        packed = packed_for_gpu(
            torch.randint(16, (N, K), device=report.device, dtype=torch.uint8),
            torch.rand(N, groups, device=report.device).half() / 8,
            torch.randint(17, (N, groups), device=report.device, dtype=torch.int8),
            has_zeros=True,
        )
        weight_NK = reference.weights(packed, torch.bfloat16)
        for M in (3, 65) if toy else _BATCH_SIZES:
            case = f"{name} {N}x{K}, M={M}"
            if not report.has_time(_SECONDS):
                report.skip("int4_gemm", case, "no time left")
                continue
            x_MK = torch.randn(M, K, device=report.device, dtype=torch.bfloat16)
            expected = x_MK[-1:].double() @ weight_NK[:4096].double().t()
            y_MN = int4_gemm(x_MK, packed)
            report.check("int4_gemm", case, y_MN[-1:, :4096], expected, rtol=2**-7, atol=2e-3 * K**0.5)
            cublas = report.milliseconds(lambda x_MK=x_MK, weight_NK=weight_NK: gemm(x_MK, weight_NK))
            milliseconds = report.milliseconds(lambda x_MK=x_MK, packed=packed: int4_gemm(x_MK, packed))
            report.row(
                "int4_gemm",
                case,
                "triton",
                milliseconds,
                tflops=2 * M * N * K / milliseconds / 1e9,
                share_of_copy=report.share_of_copy(packed.num_bytes, milliseconds),
                of_cublas=cublas / milliseconds,
            )
