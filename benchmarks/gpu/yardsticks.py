"""Ceilings of a GPU, which shares are taken of: a copy's bandwidth, that of reads alone, and cuBLAS's speed in bf16.

All by events around each call, on random numbers (zeros run faster), 2 GiB and more, far beyond the L2. A copy is a
Triton kernel: torch's `copy_` becomes a memcpy node in a graph, which ran at 2.78 TB/s on an H200 where the same copy
by events ran at 4.27; so shares measured by graphs were 1.53 times too high on 2026-11-26 (docs/gpu.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_common.jit import jit

# Numbers that a program copies at once, or reads in one turn of its loop: 16 bytes a thread.
_BLOCK = 2048
# Turns of a program that reads, so that its one store does not count.
_TURNS = 32


@jit
def _copy_kernel(source, target, num, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < num, other=0), mask=place < num)


@jit
def _sum_kernel(source, sums, num, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in range(TURNS):
        place = first + turn * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + place, mask=place < num, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@dataclass(frozen=True, slots=True)
class Traffic:
    """A call that moves `num_bytes` through the GPU's memory."""

    call: Callable[[], object]
    num_bytes: int


def copy_of(source: torch.Tensor) -> tuple[Traffic, torch.Tensor]:
    """A copy of int32 numbers by a kernel, and the tensor that it fills. Bytes read and written count."""
    target = torch.empty_like(source)
    num = source.numel()

    def call() -> None:
        _copy_kernel[(triton.cdiv(num, _BLOCK),)](source, target, num, BLOCK=_BLOCK, num_warps=4)

    return Traffic(call, 2 * source.nbytes), target


def sums_of(source: torch.Tensor) -> tuple[Traffic, torch.Tensor]:
    """Sums of int32 numbers, modulo 2^32, and the tensor that they go to, one for each program: reads alone."""
    num = source.numel()
    sums = torch.empty(triton.cdiv(num, _BLOCK * _TURNS), dtype=torch.int32, device=source.device)

    def call() -> None:
        _sum_kernel[(len(sums),)](source, sums, num, BLOCK=_BLOCK, TURNS=_TURNS, num_warps=4)

    return Traffic(call, source.nbytes), sums


def random_numbers(num_bytes: int, device: str) -> torch.Tensor:
    """Random int32 numbers of so many bytes."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device, generator=generator)
