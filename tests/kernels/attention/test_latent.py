"""Latent attention on a CPU, in C++ and in PyTorch. (On a GPU: test_latent_triton.py.)"""

import numpy as np
import pytest
import torch

from kernels.attention.latent import MlaPlanner
from kernels.attention.latent.reference import mla_attention
from kernels.attention.plan import StepRows
from kernels.backend import Backend
from kernels.kv_cache.layout import LatentShape
from tests.support.kernels.kernel_paths import KINDS, NATIVE_KINDS, path_of

SHAPE = LatentShape(num_heads=6, latent_size=40, rope_size=16)
SCALE, BLOCK_SIZE = 0.2, 16


def _cache(dtype: torch.dtype) -> torch.Tensor:
    cache = torch.randn(40, BLOCK_SIZE, SHAPE.entry_size, generator=torch.Generator().manual_seed(0))
    # A block that no row has written.
    cache[0] = 1e4
    return cache.to(dtype)


def _attend(
    backend: Backend, q_THE: torch.Tensor, cache: torch.Tensor, rows: list[tuple[int, int, range]]
) -> torch.Tensor:
    """rows: (number of queries, context length, blocks)."""
    tables = np.zeros((len(rows), 16), np.int32)
    for table, (_, _, blocks) in zip(tables, rows, strict=True):
        table[: len(blocks)] = blocks
    step = StepRows(
        query_starts=np.cumsum([0, *(count for count, _, _ in rows)], dtype=np.int32),
        context_lens=np.array([length for _, length, _ in rows], np.int32),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        cache_dtype=cache.dtype,
    )
    return MlaPlanner(backend, SHAPE).plan(step).attend(q_THE, cache, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Decodes, a later chunk, a whole prompt; contexts of one token and of more than one kernel chunk. The expected
    products use the cache's rounded numbers, so a bfloat16 cache adds no error."""
    rows = [(1, 1, range(5, 6)), (1, 150, range(6, 16)), (5, 70, range(20, 25)), (33, 33, range(30, 33))]
    cache = _cache(dtype)
    q_THE = torch.randn(40, SHAPE.num_heads, SHAPE.entry_size, generator=torch.Generator().manual_seed(1))
    got = _attend(path_of(kind, dtype), q_THE, cache, rows)
    tables = np.zeros((4, 10), np.int32)
    for table, (_, _, blocks) in zip(tables, rows, strict=True):
        table[: len(blocks)] = blocks
    expected = mla_attention(
        q_THE,
        cache,
        query_starts=np.array([0, 1, 2, 7, 40]),
        context_lens=np.array([length for _, length, _ in rows]),
        block_tables=tables,
        scale=SCALE,
        latent_size=SHAPE.latent_size,
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_a_query_has_its_bits_in_any_chunk_and_company(kind: str, dtype: torch.dtype) -> None:
    path, cache = path_of(kind, dtype), _cache(dtype)
    q_THE = torch.randn(90, SHAPE.num_heads, SHAPE.entry_size, generator=torch.Generator().manual_seed(2))
    blocks, others = range(1, 7), range(10, 15)
    whole = _attend(path, q_THE, cache, [(90, 90, blocks)])
    first = _attend(path, q_THE[:65], cache, [(65, 65, blocks)])
    among = torch.cat((q_THE[:3], q_THE[65:89], q_THE[:1]))
    second = _attend(path, among, cache, [(3, 70, others), (24, 89, blocks), (1, 9, others)])[3:27]
    last = _attend(path, q_THE[89:], cache, [(1, 90, blocks)])
    assert torch.equal(torch.cat((first, second, last)), whole)
