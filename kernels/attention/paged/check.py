"""Checks C++ rope, cache write and paged attention against the references, at load."""

import numpy as np
import torch

from kernels.attention.paged import AttentionPlanner
from kernels.attention.paged import reference as attention_reference
from kernels.attention.plan import StepRows
from kernels.backend import native_backend
from kernels.elementwise.rope import cos_sin_table
from kernels.kv_cache.layout import HeadShape
from kernels.kv_cache.write import RopeCacheWrite
from kernels.kv_cache.write.reference import rope_cache_write
from kernels.native.check import compare
from kernels.native.library import NativeKernels

_BLOCK_SIZE = 8
# AMX computes heads of a multiple of 32 numbers.
_HEADS = HeadShape(num_heads=6, num_kv_heads=2, head_size=32)


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming dtype and error, if results differ."""
    generator = torch.Generator().manual_seed(0)
    # Where KV is rounded, errors of 2^-8 (bfloat16) or 2^-4 (e4m3) add up like a random walk.
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float8_e4m3fn, 2e-1)):
        _check_dtype(kernels, dtype, generator, tolerance)


def _check_dtype(kernels: NativeKernels, dtype: torch.dtype, generator: torch.Generator, tolerance: float) -> None:
    """A decode after 21 tokens and 6 queries after 64; rope and the cache write under test produced all KV."""
    compute_dtype = dtype if dtype is torch.float32 else torch.bfloat16
    path, heads = native_backend(compute_dtype, kernels, dtype), _HEADS
    write = RopeCacheWrite(path, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size)
    tables = np.arange(1, 19, dtype=np.int32).reshape(2, 9)
    shape = (19, _BLOCK_SIZE, 2, heads.num_kv_heads, heads.head_size)
    cache, plain = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.float64)
    for positions in ((range(21), range(64)), (range(21, 22), range(64, 70))):
        flat = torch.tensor([*positions[0], *positions[1]])
        slots = torch.tensor(
            [tables[row, p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for row in (0, 1) for p in positions[row]],
            dtype=torch.int64,
        )
        qkv = torch.randn(len(flat), (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size, generator=generator)
        cos_sin = cos_sin_table(flat, 1.0 / 100.0 ** (torch.arange(heads.head_size // 2) / 8), 1.0)
        q, k, v = rope_cache_write(qkv, cos_sin, heads.num_heads, heads.num_kv_heads, heads.head_size, None, 1e-5)
        plain[slots // _BLOCK_SIZE, slots % _BLOCK_SIZE] = torch.stack((k, v), dim=1)
        got_q = write(qkv, cos_sin, cache, slots)
    # Only the second step's attention is checked: the reference goes token by token, and a second is long for a start.
    step = {
        "query_starts": np.array([0, len(positions[0]), len(flat)], dtype=np.int32),
        "context_lens": np.array([rows[-1] + 1 for rows in positions], dtype=np.int32),
        "block_tables": tables,
    }
    expected = attention_reference.paged_attention(q, plain, **step, scale=0.25)
    plan = AttentionPlanner(path, heads).plan(StepRows(**step, block_size=_BLOCK_SIZE, cache_dtype=dtype))
    compare(kernels, f"attention over {dtype}", plan.attend(got_q, cache, 0.25), expected, tolerance)
    sinks = torch.linspace(-1.0, 1.0, heads.num_heads)
    expected = attention_reference.paged_attention(q, plain, **step, scale=0.25, soft_cap=2.0, sinks=sinks)
    got = plan.attend(got_q, cache, 0.25, soft_cap=2.0, sinks_H=sinks)
    compare(kernels, f"attention with a cap and sinks over {dtype}", got, expected, tolerance)
