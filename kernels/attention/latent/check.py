"""Checks C++ MLA against the reference, at load."""

import numpy as np
import torch

from kernels.attention.latent import MlaPlanner
from kernels.attention.latent import reference as mla_reference
from kernels.attention.plan import StepRows
from kernels.backend import native_backend
from kernels.kv_cache.layout import LatentShape
from kernels.native.check import compare
from kernels.native.library import NativeKernels

_BLOCK_SIZE = 8


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming dtype and error, if results differ."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        _check_dtype(kernels, dtype, generator)


def _check_dtype(kernels: NativeKernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """A decode after 69 tokens and 2 queries after 9: more and less than a chunk, and heads that don't fill tiles."""
    shape = LatentShape(num_heads=5, latent_size=24, rope_size=8)
    cache = torch.randn(14, _BLOCK_SIZE, shape.entry_size, generator=generator).to(dtype)
    queries = torch.randn(3, shape.num_heads, shape.entry_size, generator=generator)
    step = {
        "query_starts": np.array([0, 1, 3], dtype=np.int32),
        "context_lens": np.array([70, 11], dtype=np.int32),
        "block_tables": np.stack((np.arange(1, 10), np.full(9, 12))).astype(np.int32),
    }
    step["block_tables"][1, 1] = 13
    expected = mla_reference.mla_attention(
        queries, cache, **step, scale=0.25, latent_size=shape.latent_size, kv_scale=None
    )
    planner = MlaPlanner(native_backend(dtype, kernels), shape)
    plan = planner.plan(StepRows(**step, block_size=_BLOCK_SIZE, cache_dtype=dtype))
    compare(kernels, f"MLA over {dtype}", plan.attend(queries, cache, 0.25), expected, 1e-5)
