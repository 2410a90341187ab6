"""The GPU's GEMM against float64; a row of the batch-invariant GEMM has the same bits at any place.

Memory that must not be read is NaN: rows beyond M and N, columns beyond K.
"""

import pytest
import torch

from kernels.gemm.dense import reference
from kernels.gemm.dense.triton import (
    FEW,
    FLOAT32,
    MANY,
    GemmTile,
    cut_of_k,
    gemm,
    invariant_gemm,
    should_split,
    tile_for,
)
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded

# More than one tile of outputs and more than one step of K; the last tile and the last step are partial.
N, K = 130, 200
# Two parts of 9 steps of 64 each; the last step is partial.
LONG = 1096


def random(
    rows: int, columns: int, dtype: torch.dtype, seed: int, stride: int = 16, outside: float = float("nan")
) -> torch.Tensor:
    """A matrix in wider and longer memory, filled with `outside`. A row depends only on the seed and its number."""
    wide = torch.full((rows + 1, columns + stride), outside)
    wide[:-1, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[:rows, :columns]


def bias_of(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(9)) * 10).to(dtype).to(DEVICE)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 5, LONG), (66, N, K)])
def test_agrees_with_float64(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, out_dtype: torch.dtype, batch_invariant: bool
) -> None:
    # On a CPU with AMX, PyTorch's own GEMM multiplies what lies behind a row by zeros (torch 2.13).
    outside = 0.0 if DEVICE == "cpu" and not batch_invariant else float("nan")
    x, weight = random(rows, inputs, dtype, 1, outside=outside), random(outputs, inputs, dtype, 2, outside=outside)
    bias = bias_of(outputs, dtype)
    y = gemm(x, weight, out_dtype=out_dtype, batch_invariant=batch_invariant)
    assert y.dtype is out_dtype
    # Up to a thousand products of size 1 are added up in float32.
    assert_rounded(y, reference.gemm(x.cpu(), weight.cpu()), error=1e-5)
    memory = torch.full((rows + 1, outputs + 3), float("nan"), dtype=out_dtype, device=DEVICE)
    out = memory[:rows, :outputs]
    assert gemm(x, weight, bias_N=bias, out_dtype=out_dtype, batch_invariant=batch_invariant, out=out) is out
    assert_rounded(out, reference.gemm(x.cpu(), weight.cpu(), bias.cpu()), error=1e-5)
    assert memory[rows].isnan().all()
    assert memory[:, outputs:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "batch", "inputs"), [(torch.bfloat16, 140, K), (torch.float16, 140, K), (torch.float32, 40, 40)]
)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, batch: int, inputs: int) -> None:
    """Alone, in batches of both tiles, and at the first, last and other places of a tile. float32 hides no bit."""
    x, weight = random(batch, inputs, dtype, 1), random(N, inputs, dtype, 2)
    together = gemm(x, weight, out_dtype=torch.float32, batch_invariant=True)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for rows in (order, order[:64], order[:65], order[:7], *torch.tensor([[0], [5], [31], [32], [batch - 1]])):
        alone = gemm(x[rows], weight, out_dtype=torch.float32, batch_invariant=True)
        assert torch.equal(alone, together[rows]), rows


def test_who_computes_a_part_of_k_changes_no_bit() -> None:
    """Both tiles, with parts of K added by one program and by a separate kernel."""
    x, weight = (random(rows, LONG, torch.bfloat16, rows) for rows in (70, N))
    bias = bias_of(N, torch.bfloat16)
    assert cut_of_k(N, LONG, FEW) == cut_of_k(N, LONG, MANY) == (2, 9)
    results: list[torch.Tensor] = []
    for tile in (FEW, MANY):
        for split in (False, True):
            out = torch.full((70, N), float("nan"), device=DEVICE)
            invariant_gemm(x, weight, bias, out, tile=tile, split=split)
            results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_may_be_any_stride_apart() -> None:
    x, weight = random(5, 80, torch.bfloat16, 1), random(70, 80, torch.bfloat16, 2)
    expected = gemm(x.contiguous(), weight.contiguous(), batch_invariant=True)
    every_other = random(10, 80, torch.bfloat16, 3, stride=7)
    every_other[::2] = x
    assert torch.equal(gemm(every_other[::2], weight, batch_invariant=True), expected)
    assert torch.equal(gemm(x[:1].expand(5, 80), weight, batch_invariant=True), expected[:1].expand(5, 70))


def test_no_rows_are_fine() -> None:
    weight = random(70, 80, torch.bfloat16, 2)
    for batch_invariant in (False, True):
        assert gemm(random(0, 80, torch.bfloat16, 1), weight, batch_invariant=batch_invariant).shape == (0, 70)


@pytest.mark.parametrize("tile", [FEW, MANY, FLOAT32], ids=["few", "many", "float32"])
@pytest.mark.parametrize("inputs", [1, 64, 511, 1024, 4096, 14336, 28672])
def test_parts_cover_k_and_none_is_empty(inputs: int, tile: GemmTile) -> None:
    for outputs in (1, 1024, 4096, 6144, 28672, 128256):
        cut = cut_of_k(outputs, inputs, tile)
        steps = -(-inputs // tile.block_k)
        assert 1 <= cut.num_parts <= 8
        assert (cut.num_parts - 1) * cut.steps < steps <= cut.num_parts * cut.steps


def test_few_tiles_are_shared_among_programs_and_wide_outputs_are_not() -> None:
    """In a decode, o_proj of an 8B model has 32 tiles of outputs, each in 4 parts of K; its head has enough tiles
    unsplit."""
    few = tile_for(8, torch.bfloat16)
    assert (few, cut_of_k(4096, 4096, few).num_parts, should_split(8, 4096, few)) == (FEW, 4, True)
    assert cut_of_k(128256, 4096, few).num_parts == 1
    many = tile_for(2048, torch.bfloat16)
    assert (many, cut_of_k(4096, 4096, many).num_parts, should_split(2048, 4096, many)) == (MANY, 4, False)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = random(2, 64, torch.bfloat16, 1), random(8, 64, torch.bfloat16, 2)
    with pytest.raises(ValueError, match=r"weight of shape \(8, 64\).* torch.bfloat16, as x is"):
        gemm(x, weight.float())
    with pytest.raises(ValueError, match="x has rows of 64, weight of 32"):
        gemm(x, weight[:, :32])
    with pytest.raises(ValueError, match="rows are contiguous"):
        gemm(x, random(64, 8, torch.bfloat16, 2).t())
    with pytest.raises(ValueError, match=r"bias of shape \(8,\) and torch.float32: has to be \[8\] of torch.bfloat16"):
        gemm(x, weight, bias_N=bias_of(8, torch.float32))
    with pytest.raises(ValueError, match=r"\(2, 8\) of torch.float32"):
        gemm(x, weight, out_dtype=torch.float32, out=torch.empty(2, 8, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(ValueError, match=r"both have to be of torch.bfloat16"):
        gemm(x.double(), weight.double())
