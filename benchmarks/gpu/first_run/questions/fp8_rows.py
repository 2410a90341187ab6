"""Does the FP8 GEMM of few rows gain from reading only the rows that exist? Also the experts' GEMM, with one token.

Until 2026-11-28 rows beyond M read row 0 again: M = 1 took 1.17 to 1.48 times as long as M = 16, in all ten layers that
were measured (with tiles of 16 x 32, by graphs). Predicted: 0.76 of the time at M = 1, the same from 16 on.
"""

from collections.abc import Callable

import torch

from benchmarks.gpu.first_run.trees import STATES, state
from benchmarks.gpu.report import Report

OP = "fp8_rows"
_LAYERS = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336))
_BATCH_SIZES = (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 256)
# Mixtral-8x7B: experts, those of a token, hidden size and size of an expert.
_EXPERTS, _TOP_K, _HIDDEN, _SIZE = 8, 2, 4096, 14336
_SECONDS = 3.0

Make = Callable[[], Callable[[], torch.Tensor]]


def run(report: Report, *, toy: bool) -> None:
    torch.manual_seed(0)
    for name, N, K in (("toy", 130, 300),) if toy else _LAYERS:
        weight_NK = torch.randn(N, K, device=report.device, dtype=torch.bfloat16)
        for M in (3,) if toy else _BATCH_SIZES:
            if not report.has_time(_SECONDS):
                report.skip(OP, f"{name}, M={M}", "no time left")
                continue
            x_MK = torch.randn(M, K, device=report.device, dtype=torch.bfloat16)
            for scales in ("channel", "block") if M in (1, 3, 16) else ("channel",):
                makes = {each: _gemm(each, x_MK, weight_NK, scales) for each in STATES}
                report.compare(OP, f"{name}, {scales}, M={M}", makes, dict.fromkeys(STATES, N * K))
    sizes = (8, 2, 128, 128) if toy else (_EXPERTS, _TOP_K, _HIDDEN, _SIZE)
    for num_tokens in (1, 2) if toy else (1, 4, 16):
        makes = {each: _experts(each, report.device, num_tokens, *sizes) for each in STATES}
        report.compare(OP, f"experts, {num_tokens} tokens", makes)


def _gemm(name: str, x_MK: torch.Tensor, weight_NK: torch.Tensor, scales: str) -> Make:
    def make() -> Callable[[], torch.Tensor]:
        with state(name) as load:
            quantize = load("kernels.gemm.quantize.triton")
            fp8_gemm = load("kernels.gemm.fp8.dispatch").fp8_gemm
            if scales == "channel":
                (x, x_scales), (w, w_scales) = (quantize.quantize_tokens(each) for each in (x_MK, weight_NK))
            else:
                (x, x_scales), (w, w_scales) = quantize.quantize_groups(x_MK), quantize.quantize_blocks(weight_NK)
        return lambda: fp8_gemm(x, w, x_scales, w_scales, path="triton")

    return make


def _experts(
    name: str, device: str, num_tokens: int, num_experts: int, top_k: int, hidden_size: int, size: int
) -> Make:
    def make() -> Callable[[], torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

        with state(name) as load:
            quantize = load("kernels.gemm.quantize.triton")
            moe = load("kernels.moe.gemm.triton")
            route = load("kernels.moe.routing.triton").route

            def blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
                """Experts' weights in e4m3, and the scales of their blocks."""
                weights, scales = zip(
                    *(quantize.quantize_blocks(drawn(*shape)) for _ in range(num_experts)), strict=True
                )
                return torch.stack(weights), torch.stack(scales)

            gate_up, gate_up_scales = blocks(2 * size, hidden_size)
            down, down_scales = blocks(hidden_size, size)
            experts = moe.Experts(
                gate_up_E2IH=gate_up,
                down_EHI=down,
                gate_up_scales=gate_up_scales,
                down_scales=down_scales.contiguous(),
            )
            x_TH = drawn(num_tokens, hidden_size)
            weights_TK, experts_TK = route(drawn(num_tokens, num_experts).float(), top_k=top_k)
        return lambda: moe.run_experts(x_TH, experts, weights_TK, experts_TK)

    return make
