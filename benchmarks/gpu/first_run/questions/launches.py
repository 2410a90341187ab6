"""How long does Python take to launch a kernel, before and now?

50 to 55 us a launch on an H200 (2026-11-26), which makes eager steps of 458 launches take 25 ms; the target is 10 us.
Timed by the clock of the host over many calls whose work on the GPU is next to nothing, so that its queue stays empty.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.first_run.questions._decodes import Decode
from benchmarks.gpu.first_run.trees import STATES, state
from benchmarks.gpu.report import Missing, Report

OP = "launches"
_CALLS, _ROUNDS = 50, 9


def run(report: Report, *, toy: bool) -> None:
    for name in STATES:
        for case, make in (("rms_norm", _norm), ("fp8_gemm", _gemm), ("paged_attention, decode", _attention)):
            report.attempt(OP, f"{case}, {name}", partial(_time, report, name, case, make, toy))


def _time(report: Report, name: str, case: str, make: Callable[..., Callable[[], object]], toy: bool) -> None:
    try:
        call = make(name, report.device, toy)
    except Missing as missing:
        report.missing(OP, case, name, str(missing))
        return
    microseconds = _microseconds(call, toy)
    report.row(OP, case, name, microseconds / 1e3, us_a_call=microseconds)


def _microseconds(call: Callable[[], object], toy: bool) -> float:
    """The median time of the host a call; NaN in toy mode."""
    call()
    if toy:
        return float("nan")
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / _CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def _norm(name: str, device: str, toy: bool) -> Callable[[], object]:
    x = torch.randn(1, 256, device=device, dtype=torch.bfloat16)
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    with state(name) as load:
        rms_norm = load("kernels.elementwise.rms_norm.triton").rms_norm
    return lambda: rms_norm(x, weight, 1e-5)


def _gemm(name: str, device: str, toy: bool) -> Callable[[], object]:
    with state(name) as load:
        quantize_tokens = load("kernels.gemm.quantize.triton").quantize_tokens
        fp8_gemm = load("kernels.gemm.fp8.dispatch").fp8_gemm
        (x, x_scales), (w, w_scales) = (
            quantize_tokens(torch.randn(rows, 256, device=device, dtype=torch.bfloat16)) for rows in (1, 128)
        )
    return lambda: fp8_gemm(x, w, x_scales, w_scales, path="triton")


def _attention(name: str, device: str, toy: bool) -> Callable[[], object]:
    """Two launches: the decode and its reduction."""
    return Decode(batch=1, context=16, cache_dtype=torch.bfloat16, device=device, toy=toy).in_state(name)()
