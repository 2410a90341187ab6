"""Swaps of blocks between a GPU and pinned host memory: as one run, and without any neighbouring blocks."""

import time

import torch

from benchmarks.gpu.report import Report
from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.swap.torch_gpu import BlockSwap, copy_runs, merge_runs, pinned_layers

_REPETITIONS = 10


def run(report: Report, *, toy: bool) -> None:
    num_layers, num_blocks, num_swapped = (2, 8, 3) if toy else (32, 512, 128)
    shape = gpu_cache_shape(num_blocks=num_blocks, block_size=16, num_kv_heads=1 if toy else 8, head_size=128)
    layers = [torch.randn(shape, device=report.device, dtype=torch.bfloat16) for _ in range(num_layers)]
    for name, step in (("one run", 1), ("no neighbours", 2)):
        blocks = list(range(0, num_swapped * step, step))
        case = f"{num_swapped} blocks of {num_layers} layers, {name}"
        if toy:
            _check_copies(report, case, layers, blocks)
        elif not report.has_time(10):
            report.skip("block_swap", case, "no time left")
        else:
            _swap(report, case, layers, blocks)


def _check_copies(report: Report, case: str, layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Checks a swap's copies alone: without a GPU there are no streams."""
    host = [torch.empty_like(layer) for layer in layers]
    copy_runs(layers, host, merge_runs(blocks, blocks))
    report.check("block_swap", case, host[-1][blocks], layers[-1][blocks], rtol=0, atol=0)


def _swap(report: Report, case: str, layers: list[torch.Tensor], blocks: list[int]) -> None:
    host = pinned_layers(layers, len(layers[0]))
    swap = BlockSwap(layers, host)
    before = layers[-1][blocks].clone()
    swap.swap_out(blocks, blocks).wait()
    for layer in layers:
        layer[blocks] = 0
    swap.swap_in(blocks, blocks).wait()
    report.check("block_swap", case, layers[-1][blocks], before, rtol=0, atol=0)

    num_bytes = len(blocks) * len(layers) * layers[0][0].numel() * layers[0].element_size()
    for way, call in (("out", swap.swap_out), ("in", swap.swap_in)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_REPETITIONS):
            call(blocks, blocks)
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / _REPETITIONS
        report.row(
            "block_swap",
            case,
            way,
            seconds * 1e3,
            gigabytes_per_s=num_bytes / seconds / 1e9,
            host_ms=queued / _REPETITIONS * 1e3,
        )
