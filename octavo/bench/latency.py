"""Measures the latency of one batch: requests that start together, from the first step to the end of the last."""

from collections.abc import Callable

import numpy as np

from octavo.bench.throughput import Bench
from octavo.reports import Report

# As in vLLM's benchmark.
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure_latency(
    bench: Bench, batch_size: int, *, num_iters: int, num_iters_warmup: int, on_done: Callable[[int], None]
) -> dict[str, object]:
    """Runs the batch num_iters times. on_done is called with 1 after each run, those of the warm-up included.

    Keys: model, dtype, batch_size, prompt_len, output_len, num_iters; latency_s, its mean, with _std, _min, _p10 to
    _p99; ttft_s and itl_ms, their medians over all runs and requests.
    """
    reports: list[Report] = []
    for number in range(num_iters_warmup + num_iters):
        # The warm-up of each measurement is the iterations before it.
        report = bench.measure(batch_size, profile=False, on_tokens=lambda count: None, warms_up=False)
        if number >= num_iters_warmup:
            reports.append(report)
        on_done(1)
    seconds = np.array([report.duration for report in reports])
    traces = [trace for report in reports for trace in report.traces]
    first = reports[0]
    return {
        "model": first.model,
        "dtype": first.dtype,
        "batch_size": batch_size,
        "prompt_len": first.prompt_len,
        "output_len": first.output_len,
        "num_iters": num_iters,
        "latency_s": round(float(seconds.mean()), 5),
        "latency_s_std": round(float(seconds.std()), 5),
        "latency_s_min": round(float(seconds.min()), 5),
        **{f"latency_s_p{p}": round(float(np.percentile(seconds, p)), 5) for p in _PERCENTILES},
        "ttft_s_p50": round(float(np.median([trace.ttft for trace in traces])), 5),
        "itl_ms_p50": round(float(np.median([gap for trace in traces for gap in trace.itl] or [0.0])) * 1e3, 4),
    }
