"""One launch of one kernel between cudaProfilerStart and Stop, for a profiler:

ncu --profile-from-start off ... python -m benchmarks.gpu.first_run.one_kernel e4m3_decode [--toy]
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_KERNELS = ("e4m3_decode", "fp8_gemm_one_row", "int4_gemm", "prefill")


def main() -> int:
    parser = argparse.ArgumentParser(description="Launches one kernel for a profiler.")
    parser.add_argument("kernel", choices=_KERNELS)
    parser.add_argument("--toy", action="store_true", help="a small size in Triton's interpreter, without a profiler")
    parser.add_argument("--small", action="store_true", help="a small size on the GPU")
    arguments = parser.parse_args()
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    device = "cpu" if arguments.toy else "cuda"
    torch.manual_seed(0)
    call = _call(arguments.kernel, device, arguments.toy or arguments.small)
    # Compiles, and fills what is made at the first call.
    call()
    if not arguments.toy:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    out = call()
    if not arguments.toy:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    assert out.isfinite().all()
    print(f"{arguments.kernel}: {tuple(out.shape)} computed", flush=True)
    return 0


def _call(kernel: str, device: str, small: bool) -> "Callable[[], torch.Tensor]":
    import torch

    from benchmarks.gpu.first_run.questions._decodes import Decode
    from kernels.gemm.fp8.dispatch import fp8_gemm
    from kernels.gemm.int4.layout import packed_for_gpu
    from kernels.gemm.int4.triton import int4_gemm
    from kernels.gemm.quantize.triton import quantize_tokens

    if kernel == "e4m3_decode":
        batch, context = (2, 40) if small else (64, 4096)
        return Decode(batch=batch, context=context, cache_dtype=torch.float8_e4m3fn, device=device, toy=small).in_state(
            "now"
        )()
    # Gate and up of Llama-3.1-8B.
    N, K = (130, 320) if small else (28672, 4096)
    x_MK = torch.randn(1, K, device=device, dtype=torch.bfloat16)
    if kernel == "fp8_gemm_one_row":
        weight_NK = torch.randn(N, K, device=device, dtype=torch.bfloat16)
        (x, x_scales), (w, w_scales) = (quantize_tokens(each) for each in (x_MK, weight_NK))
        return lambda: fp8_gemm(x, w, x_scales, w_scales, path="triton")
    if kernel == "int4_gemm":
        packed = packed_for_gpu(
            torch.randint(16, (N, K), device=device, dtype=torch.uint8),
            torch.rand(N, K // 32, device=device).half() / 8,
            torch.randint(17, (N, K // 32), device=device, dtype=torch.int8),
            has_zeros=True,
        )
        return lambda: int4_gemm(x_MK, packed)
    from benchmarks.gpu.ops.paged_attention import LLAMA_8B, TOY, Case

    return Case.make(*((TOY, 1, 33, 33) if small else (LLAMA_8B, 1, 8192, 8192)), device, torch.bfloat16).ours


if __name__ == "__main__":
    sys.exit(main())
