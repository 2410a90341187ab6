"""The GPU's GEMM with 4-bit weights against float64; a row has the same bits in any batch.

Memory that must not be read is NaN: rows beyond M, columns beyond K.
"""

from dataclasses import replace

import pytest
import torch

from kernels.gemm.int4 import reference
from kernels.gemm.int4.layout import GpuInt4, packed_for_gpu
from kernels.gemm.int4.triton import FEW, MANY, int4_gemm
from kernels.linear.weights import Int4Weight, dequantize, num_groups
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded

# More than one tile of outputs and more than one span; the last tile, span and group are partial.
N, K = 130, 200
# Two parts of 9 spans each; the last span is partial.
LONG = 1096


def weight_of(num_outputs: int, num_inputs: int, *, has_zeros: bool) -> tuple[GpuInt4, Int4Weight]:
    generator = torch.Generator().manual_seed(num_outputs)
    shape, groups = (num_outputs, num_inputs), (num_outputs, num_groups(num_inputs))
    values = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(groups, generator=generator) + 0.1).half()
    minima = torch.randn(groups, generator=generator).half()
    if has_zeros:
        minima = torch.randint(17, groups, generator=generator, dtype=torch.int8)
    weight = Int4Weight(values_OI=values, scales_OG=scales, minima_OG=minima)
    tensors = (tensor.to(DEVICE) for tensor in (values, scales, minima))
    return packed_for_gpu(*tensors, has_zeros=has_zeros), weight


def random(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """A matrix in wider and longer memory. A row depends only on the seed and its number."""
    wide = torch.full((rows + 1, columns + 16), float("nan"))
    wide[:-1, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[:rows, :columns]


def bias_of(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(9)) * 10).to(dtype).to(DEVICE)


def _on_cpu(weight: GpuInt4) -> GpuInt4:
    return replace(weight, packed_NB=weight.packed_NB.cpu(), scales_SN=weight.scales_SN.cpu())


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("num_inputs", [1, 33, 64, K])
def test_the_layout_holds_the_weight(num_inputs: int, has_zeros: bool) -> None:
    packed, weight = weight_of(N, num_inputs, has_zeros=has_zeros)
    assert torch.equal(reference.weights(_on_cpu(packed), torch.float32), dequantize(weight))
    num_spans = -(-num_inputs // 64)
    assert packed.num_bytes == N * num_spans * (32 + 4 + 4)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 5, LONG), (66, N, K)])
def test_agrees_with_float64(rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_zeros: bool) -> None:
    (weight, _), x, bias = weight_of(outputs, inputs, has_zeros=has_zeros), random(rows, inputs, dtype), None
    # Up to a thousand products of size 10 are added up in float32.
    assert_rounded(int4_gemm(x, weight), reference.int4_gemm(x.cpu(), _on_cpu(weight)), error=1e-5)
    bias = bias_of(outputs, dtype)
    memory = torch.full((rows + 1, outputs + 3), float("nan"), dtype=dtype, device=DEVICE)
    out = memory[:rows, :outputs]
    assert int4_gemm(x, weight, bias_N=bias, out=out) is out
    assert_rounded(out, reference.int4_gemm(x.cpu(), _on_cpu(weight), bias.cpu()), error=1e-5)
    assert memory[rows].isnan().all()
    assert memory[:, outputs:].isnan().all()


@pytest.mark.parametrize(("dtype", "batch"), [(torch.bfloat16, 140), (torch.float32, 40)])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, batch: int) -> None:
    """Alone, in batches of both tiles, and at other places of a tile."""
    (weight, _), x = weight_of(N, K, has_zeros=True), random(batch, K, dtype)
    together = int4_gemm(x, weight)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for rows in (order, order[:64], order[:65], *torch.tensor([[0], [31], [batch - 1]])):
        assert torch.equal(int4_gemm(x[rows], weight), together[rows]), rows


def test_who_computes_a_part_of_k_changes_no_bit() -> None:
    """Both tiles, with parts of K added by one program and by a separate kernel."""
    (weight, _), x = weight_of(N, LONG, has_zeros=False), random(70, LONG, torch.bfloat16)
    bias = bias_of(N, torch.bfloat16)
    results = [
        int4_gemm(x, weight, bias_N=bias, tile=tile, split=split) for tile in (FEW, MANY) for split in (False, True)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_no_rows_are_fine_and_what_does_not_fit_is_refused() -> None:
    (weight, _), x = weight_of(8, 64, has_zeros=True), random(2, 64, torch.bfloat16)
    assert int4_gemm(x[:0], weight).shape == (0, 8)
    with pytest.raises(ValueError, match="x has rows of 32, weight of 64"):
        int4_gemm(x[:, :32], weight)
    with pytest.raises(ValueError, match=r"has to be a matrix of torch\.bfloat16"):
        int4_gemm(x.double(), weight)
    with pytest.raises(ValueError, match="whose rows are contiguous"):
        int4_gemm(random(64, 2, torch.bfloat16).t(), weight)
    with pytest.raises(ValueError, match=r"bias of shape \(8,\) and torch.float32: has to be \[8\] of torch.bfloat16"):
        int4_gemm(x, weight, bias_N=bias_of(8, torch.float32))
    with pytest.raises(ValueError, match=r"\(2, 8\) of torch.bfloat16, its rows contiguous, is expected"):
        int4_gemm(x, weight, out=torch.empty(2, 9, dtype=torch.bfloat16, device=DEVICE))
