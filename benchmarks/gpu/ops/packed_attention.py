"""Attention over packed sequences in TFLOP/s, at the sizes of vision towers: whole images, and windows of 64 patches.
Beside it PyTorch's own attention, for whole images alone."""

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.report import Report
from kernels.attention.packed.reference import packed_attention
from kernels.attention.packed.triton import TritonPackedPlan

OP = "packed_attention"
# bf16 rounds weights and results by 2^-9 each.
_TOLERANCE = 2e-2
_SECONDS = 3.0
_WINDOW = 64


def run(report: Report, *, toy: bool) -> None:
    for num_heads, head_size in ((2, 16),) if toy else ((16, 80), (16, 72), (12, 64)):
        _check(report, num_heads, head_size)
        for num_patches in (130,) if toy else (1024, 4096, 16384):
            whole, windows = [0, num_patches], [*range(0, num_patches, _WINDOW), num_patches]
            for name, starts in (("whole", whole), ("windows", windows)):
                _measure(report, name, starts, num_heads, head_size)


def _qkv(report: Report, num_tokens: int, num_heads: int, head_size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(num_tokens, 3, num_heads, head_size, device=report.device).bfloat16().unbind(1)


def _check(report: Report, num_heads: int, head_size: int) -> None:
    starts = [0, 1, 70, 200]
    q_THD, k_THD, v_THD = _qkv(report, starts[-1], num_heads, head_size)
    plan = TritonPackedPlan(np.array(starts, np.int32), q_THD.device)
    got = plan.attend(
        q_THD, k_THD, v_THD, head_size**-0.5, torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    )
    expected = packed_attention(q_THD.cpu(), k_THD.cpu(), v_THD.cpu(), starts, head_size**-0.5)
    report.check(OP, f"{num_heads} x {head_size}", got, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _measure(report: Report, name: str, starts: list[int], num_heads: int, head_size: int) -> None:
    case = f"{starts[-1]} patches, {name}, {num_heads} heads of {head_size}"
    if not report.has_time(_SECONDS):
        report.skip(OP, case, "no time left")
        return
    q_THD, k_THD, v_THD = _qkv(report, starts[-1], num_heads, head_size)
    plan = TritonPackedPlan(np.array(starts, np.int32), q_THD.device)
    out_THD, scale = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device), head_size**-0.5
    flop = 4.0 * num_heads * head_size * sum((end - first) ** 2 for first, end in pairwise(starts))
    milliseconds = report.milliseconds(lambda: plan.attend(q_THD, k_THD, v_THD, scale, out_THD))
    report.row(OP, case, "ours", milliseconds, tflops=flop / milliseconds / 1e9)
    if name == "whole":
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        milliseconds = report.milliseconds(lambda: F.scaled_dot_product_attention(q, k, v))
        report.row(OP, case, "torch", milliseconds, tflops=flop / milliseconds / 1e9)
