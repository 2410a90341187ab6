"""Mixtures of experts: routing, alignment, and the experts themselves in bf16 and block FP8, beside a loop over
experts."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.report import Report
from kernels.gemm.quantize.triton import quantize_blocks
from kernels.moe.align.triton import align
from kernels.moe.gemm.reference import run_experts_reference
from kernels.moe.gemm.tiles import tile_for
from kernels.moe.gemm.triton import Experts, run_experts
from kernels.moe.routing.reference import route_reference
from kernels.moe.routing.triton import route

# Time for one measurement, including its compilations.
_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    size: int
    routing: dict[str, Any]


_GROUPED: dict[str, Any] = {"scoring": "sigmoid", "num_groups": 8, "top_k_groups": 4, "scaling_factor": 2.5}
# Shapes of one layer. DeepSeek-V3 has the experts of one of 8 ranks; a real token would have fewer than 8 of them.
_SHAPES = (
    _Shape("Mixtral-8x7B", 8, 2, 4096, 14336, {}),
    _Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, {}),
    _Shape("DeepSeek-V3 / 8", 32, 8, 7168, 2048, _GROUPED),
)
_TOY = (_Shape("toy", 8, 2, 128, 128, _GROUPED),)


def run(report: Report, *, toy: bool) -> None:
    for shape in _TOY if toy else _SHAPES:
        experts = _experts(shape, report.device)
        quantized = _quantized(experts)
        for num_tokens in (3,) if toy else (1, 16, 64, 256, 1024, 4096):
            _tokens(report, shape, num_tokens, experts, quantized)


def _experts(shape: _Shape, device: str) -> Experts:
    sizes = (shape.num_experts, 2 * shape.size, shape.hidden_size), (shape.num_experts, shape.hidden_size, shape.size)
    gate_up, down = (torch.randn(size, device=device, dtype=torch.bfloat16) * size[2] ** -0.5 for size in sizes)
    return Experts(gate_up_E2IH=gate_up, down_EHI=down)


def _quantized(experts: Experts) -> Experts:
    (gate_up, gate_up_scales), (down, down_scales) = (
        map(torch.stack, zip(*(quantize_blocks(each) for each in weight), strict=True))
        for weight in (experts.gate_up_E2IH, experts.down_EHI)
    )
    return Experts(
        gate_up_E2IH=gate_up, down_EHI=down, gate_up_scales=gate_up_scales, down_scales=down_scales.contiguous()
    )


def _tokens(report: Report, shape: _Shape, num_tokens: int, experts: Experts, quantized: Experts) -> None:
    case = f"{shape.name}, {num_tokens} tokens"
    if not report.has_time(_SECONDS):
        report.skip("moe", case, "no time left")
        return
    x_TH = torch.randn(num_tokens, shape.hidden_size, device=report.device).bfloat16()
    logits_TE = torch.randn(num_tokens, shape.num_experts, device=report.device)
    weights_TK, experts_TK = route(logits_TE, top_k=shape.top_k, **shape.routing)
    some = slice(0, 4)
    _, expected_TK = route_reference(logits_TE[some], top_k=shape.top_k, **shape.routing)
    report.check("moe", f"{case} route", experts_TK[some], expected_TK, rtol=0, atol=0)
    # Computes the first token with the weights of its own experts only.
    own_K = experts_TK[0].long()
    expected_TH = run_experts_reference(
        x_TH[:1].cpu(),
        experts.gate_up_E2IH[own_K].cpu(),
        experts.down_EHI[own_K].cpu(),
        weights_TK[:1],
        torch.arange(shape.top_k)[None],
    )
    out_TH = run_experts(x_TH, experts, weights_TK, experts_TK)
    size = float(expected_TH.abs().max())
    report.check("moe", f"{case} bf16", out_TH[:1], expected_TH, rtol=2**-6, atol=2**-7 * size)
    # e4m3 keeps 3 bits of weights and activations; the sums' errors average out.
    out_TH = run_experts(x_TH, quantized, weights_TK, experts_TK)
    report.check("moe", f"{case} fp8", out_TH[:1], expected_TH, rtol=0, atol=0.25 * size)

    num_pairs = num_tokens * shape.top_k
    block_m = tile_for(num_pairs, shape.num_experts).block_m
    report.row("moe", case, "route", report.milliseconds(lambda: route(logits_TE, top_k=shape.top_k, **shape.routing)))
    report.row("moe", case, "align", report.milliseconds(lambda: align(experts_TK, shape.num_experts, block_m)))
    flops = 6 * num_pairs * shape.hidden_size * shape.size
    used = len(experts_TK.unique())
    for way, weights in (("bf16", experts), ("block fp8", quantized)):
        num_bytes = 3 * used * shape.hidden_size * shape.size * weights.down_EHI.element_size()
        milliseconds = report.milliseconds(lambda weights=weights: run_experts(x_TH, weights, weights_TK, experts_TK))
        report.row(
            "moe",
            case,
            way,
            milliseconds,
            tflops=flops / milliseconds / 1e9,
            share_of_copy=report.share_of_copy(num_bytes, milliseconds),
        )
    milliseconds = report.milliseconds(lambda: _loop(x_TH, experts, weights_TK, experts_TK), by_graph=False)
    report.row("moe", case, "torch loop", milliseconds, tflops=flops / milliseconds / 1e9)


def _loop(x_TH: torch.Tensor, experts: Experts, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """The usual way in PyTorch: one expert after the other, each on its tokens."""
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for expert in range(len(experts.down_EHI)):
        tokens, ranks = (experts_TK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TH[tokens], experts.gate_up_E2IH[expert]).chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, experts.down_EHI[expert])
        out_TH.index_add_(0, tokens, down.float() * weights_TK[tokens, ranks, None])
    return out_TH.to(x_TH.dtype)
