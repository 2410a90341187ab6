"""The Pallas kernel in JAX's interpreter against the reference in float64, with pages of the size that TPUs get.

`python -m benchmarks.kernels.pallas_attention` computes more cases. Both need the extra `tpu`.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.paged.reference import paged_attention as reference
from octavo.plan.machine.tpu_pages import page_size

jax = pytest.importorskip("jax", reason="needs the extra `tpu`: pip install 'octavo[tpu]'")

# Sums of at most 1,000 products of float32: 2^-24 each, and exp's own error.
TOLERANCE = 1e-5


def rows_of(query_lens: list[int], context_lens: list[int], size: int, seed: int):
    """Block tables of scattered pages, none shared, and the page 0 where a context has ended."""
    random = np.random.default_rng(seed)
    num_pages = max(-(-length // size) for length in context_lens)
    order = iter(random.permutation(np.arange(1, 1 + num_pages * len(context_lens))).tolist())
    tables = np.zeros((len(context_lens), num_pages), np.int32)
    for row, length in enumerate(context_lens):
        for page in range(-(-length // size)):
            tables[row, page] = next(order)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return starts, np.array(context_lens, np.int32), tables


def check(
    query_lens: list[int],
    context_lens: list[int],
    *,
    size: int,
    heads: tuple[int, int] = (4, 2),
    dtype: str = "float32",
    head_size: int = 32,
    has_sinks: bool = False,
    **rules: Any,
) -> float:
    """Returns the largest error, over the largest number of the reference."""
    from kernels.attention.paged.pallas import paged_attention

    starts, lens, tables = rows_of(query_lens, context_lens, size, seed=len(query_lens))
    generator = torch.Generator().manual_seed(1)
    num_heads, num_kv_heads = heads
    q_THD = torch.randn(int(starts[-1]), num_heads, head_size, generator=generator)
    cache_N2KBD = torch.randn(int(tables.max()) + 1, 2, num_kv_heads, size, head_size, generator=generator)
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None
    # What lies in pages of nobody, and behind a context, must not be seen.
    cache_N2KBD[0] = 1e4
    found = paged_attention(
        jax.numpy.asarray(q_THD.numpy(), dtype),
        jax.numpy.asarray(cache_N2KBD.numpy(), dtype),
        query_starts=jax.numpy.asarray(starts),
        context_lens=jax.numpy.asarray(lens),
        block_tables=jax.numpy.asarray(tables),
        max_query_len=max(query_lens),
        scale=head_size**-0.5,
        sinks=None if sinks is None else jax.numpy.asarray(sinks.numpy()),
        interpret=True,
        **rules,
    )
    if dtype == "bfloat16":
        q_THD, cache_N2KBD = q_THD.bfloat16(), cache_N2KBD.bfloat16()
    expected = reference(
        q_THD,
        cache_N2KBD.permute(0, 3, 1, 2, 4),
        query_starts=starts,
        context_lens=lens,
        block_tables=tables,
        scale=head_size**-0.5,
        sinks=sinks,
        **rules,
    )
    error = (torch.from_numpy(np.asarray(found, np.float64)) - expected).abs().max()
    return float(error / expected.abs().max())


@pytest.mark.parametrize("max_model_len", [100, 300, 1000])
def test_decodes_of_rows_of_any_length(max_model_len: int) -> None:
    size = page_size(max_model_len)
    lens = [1, size, size + 1, max_model_len]
    assert check([1] * 4, lens, size=size) < TOLERANCE


def test_chunks_of_prompts_beside_decodes_and_padding() -> None:
    assert check([1, 37, 5, 0, 20], [50, 37, 33, 0, 90], size=16) < TOLERANCE


def test_a_prompt_of_several_tiles() -> None:
    assert check([150, 1], [180, 9], size=16) < TOLERANCE


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 3)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    assert check([3, 1], [40, 21], size=16, heads=heads) < TOLERANCE


@pytest.mark.parametrize(
    "rules",
    [{"window": 7}, {"window": 33}, {"attention_chunk": 24}, {"soft_cap": 3.0}, {"window": 20, "soft_cap": 5.0}],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rules_of_models(rules: dict[str, Any], has_sinks: bool) -> None:
    assert check([1, 30, 4], [60, 30, 45], size=16, has_sinks=has_sinks, **rules) < TOLERANCE


def test_bfloat16_is_rounded_once() -> None:
    """2^-9 of a number is half a step of bfloat16."""
    assert check([1, 9], [70, 40], size=16, dtype="bfloat16") < 2**-8
