"""Attention over packed sequences for GPUs, against float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.attention.packed.reference import packed_attention
from kernels.attention.packed.triton import TritonPackedPlan
from tests.support.gpu.gpu import DEVICE

# A token alone, less than a tile of 64, a tile and one more, a whole tile.
STARTS = (0, 1, 31, 96, 160)
# float32 kernels add up a few hundred numbers of size 1; bf16 rounds weights and results by 2^-9 each, fp16 by 2^-12.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def _qkv(num_heads: int, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(STARTS[-1], 3, num_heads, head_size, generator=generator)
    return qkv.to(DEVICE, dtype).unbind(1)


def _attend(starts: tuple[int, ...], *qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    return TritonPackedPlan(np.array(starts, np.int32), q.device).attend(q, k, v, 0.3, out)


@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 80), (2, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_float64(dtype: torch.dtype, num_heads: int, head_size: int) -> None:
    q, k, v = _qkv(num_heads, head_size, dtype)
    expected = packed_attention(q.cpu(), k.cpu(), v.cpu(), STARTS, 0.3)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(_attend(STARTS, q, k, v).cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_a_sequence_has_the_same_bits_wherever_it_is() -> None:
    qkv = _qkv(2, 32, torch.float32)
    packed = _attend(STARTS, *qkv)
    for first, end in pairwise(STARTS):
        assert torch.equal(_attend((0, end - first), *(x[first:end] for x in qkv)), packed[first:end])
