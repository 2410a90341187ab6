"""Linears of 8-bit and 4-bit weights: integer computation against the formulas of reference.py."""

import pytest
import torch

from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.silu_mul.reference import silu_mul
from kernels.linear import PackedLinear
from kernels.linear.reference import linear, quantized_linear
from kernels.linear.weights import Int4Weight, Int8Weight, dequantize, num_groups
from tests.support.kernels.kernel_paths import NATIVE_KINDS, kernels_of, path_of

QUANTIZATIONS = ("int8", "grouped int8", "int4", "int4 with zeros")
# Some inputs and outputs fill whole groups, pairs and panels, others do not.
SHAPES = ((3, 5), (33, 33), (70, 5), (64, 48), (97, 130))


def _weight(quantization: str, num_outputs: int, num_inputs: int) -> Int8Weight | Int4Weight:
    """Random values, including the extremes."""
    num_scales = 1 if quantization == "int8" else num_groups(num_inputs)
    scales = (torch.rand(num_outputs, num_scales) + 0.1) * num_inputs**-0.5
    if quantization.startswith("int4"):
        minima = (torch.randn(num_outputs, num_scales) * 8 * num_inputs**-0.5).half()
        if quantization == "int4 with zeros":
            minima = torch.randint(17, (num_outputs, num_scales), dtype=torch.int8)
        values = torch.randint(16, (num_outputs, num_inputs), dtype=torch.uint8)
        return Int4Weight(values_OI=values, scales_OG=scales.half(), minima_OG=minima)
    values = torch.randint(-128, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales /= 16
    return Int8Weight(values_OI=values, scales_OG=scales if quantization == "int8" else scales.half())


@pytest.fixture(params=NATIVE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def _packed(weight: Int8Weight | Int4Weight, bias: torch.Tensor | None = None, *, kind: str) -> PackedLinear:
    return PackedLinear(weight, bias, path_of(kind, torch.float32))


def _assert_near(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Float sums round by about 1e-7 of the largest output; an error of one integer step would be 4e-3."""
    assert float((y - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(kind: str, quantization: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    num_inputs, num_outputs = shape
    weight = _weight(quantization, num_outputs, num_inputs)
    for rows in (1, 2, 7, 64, 200):
        x = torch.randn(rows, num_inputs)
        for bias in (None, torch.randn(num_outputs)):
            _assert_near(_packed(weight, bias, kind=kind)(x), quantized_linear(x, weight, bias))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_integers_are_exact(kind: str, quantization: str) -> None:
    """With scales of 1 the sums are whole numbers that float32 holds exactly: a lost or saturated product shows."""
    torch.manual_seed(0)
    weight = _weight(quantization, 32, 64)
    weight.scales_OG.fill_(1)
    if isinstance(weight, Int4Weight):
        weight.minima_OG.zero_()
    x = torch.randint(-127, 128, (41, 64)).float()  # enough for AMX's tiles
    x[:, ::32] = 127  # the scale of each group is 1
    x[0], x[1] = 127, -127
    weight.values_OI[0] = 15 if isinstance(weight, Int4Weight) else 127
    weight.values_OI[1] = 0 if isinstance(weight, Int4Weight) else -128
    assert torch.equal(_packed(weight, kind=kind)(x).double(), linear(x, dequantize(weight), None))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("num_gates", [45, 16, 3])
def test_norm_gate_and_addition(kind: str, quantization: str, num_gates: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(41, 70) * 3
    weight, bias = _weight(quantization, 2 * num_gates, 70), torch.randn(2 * num_gates)
    norm, residual = torch.randn(70), torch.randn(41, num_gates)
    normed = rms_norm(x, norm, 1e-2).float()
    expected = residual + silu_mul(quantized_linear(normed, weight, bias))
    path = path_of(kind, torch.float32)
    PackedLinear(weight, bias, path, norm_I=norm, eps=1e-2, gated=True).add_to_(residual, x)
    # An input within a bit of the middle between two integers may round to the other: an error of at most one scale.
    error = (residual - expected).abs() / expected.abs().max()
    assert float(error.median()) < 1e-6
    assert float(error.max()) < 1e-2


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_largest_output_is_that_of_a_call(kind: str, quantization: str) -> None:
    torch.manual_seed(0)
    packed, x = _packed(_weight(quantization, 150, 70), torch.randn(150), kind=kind), torch.randn(41, 70)
    ids, values = packed.argmax(x)
    expected = packed(x).max(dim=1)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(values, expected.values)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_rows_that_are_zero_huge_small_or_not_finite(kind: str, quantization: str) -> None:
    """A failed row must show that it failed, and change no other row."""
    torch.manual_seed(0)
    weight = _weight(quantization, 40, 70)
    packed, x = _packed(weight, kind=kind), torch.randn(41, 70)
    before = packed(x)
    x[1], x[2], x[3] = 0, x[2] * 1e30, x[3] * 1e-20
    x[4], x[5, 69], x[6, 3], x[7, 40] = x[4] * 1e-36, float("inf"), float("nan"), float("-inf")
    y = packed(x)
    assert torch.equal(y[8:], before[8:])
    assert torch.equal(y[0], before[0])
    assert not y[1].any()
    for row in (2, 3):
        _assert_near(y[row : row + 1], quantized_linear(x[row : row + 1], weight, None))
    assert not y[4].any()
    assert not y[5:8].isfinite().any()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_largest_output_of_a_row_that_failed_shows_it(kind: str, quantization: str) -> None:
    """Greedy rows use only this output: an integer converted from NaN must not win as a regular value."""
    torch.manual_seed(0)
    kernels, packed, x = kernels_of(kind), _packed(_weight(quantization, 1000, 70), kind=kind), torch.randn(41, 70)
    before = packed.argmax(x)
    x[3, 69], x[7, 0], x[11, 33] = float("nan"), float("inf"), float("-inf")
    failed = torch.zeros(41, dtype=torch.bool)
    failed[[3, 7, 11]] = True
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            ids, values = packed.argmax(x)
            assert not values[failed].isfinite().any()
            assert torch.equal(ids[~failed], before[0][~failed])
            assert torch.equal(values[~failed], before[1][~failed])
    finally:
        kernels.set_threads(torch.get_num_threads())


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(kind: str, quantization: str, gated: bool) -> None:
    """Tiles and blocks of rows change with the number of rows; the order of a sum must not."""
    torch.manual_seed(0)
    x, path = torch.randn(400, 577), path_of(kind, torch.float32)
    weight = _weight(quantization, 66, 577)
    packed = PackedLinear(weight, None, path, norm_I=torch.randn(577), gated=gated)
    whole = packed(x)
    for rows in (*range(1, 40), 97, 200, 399):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_path_gives_the_same_bits(quantization: str) -> None:
    """Integers are exact and floats are added in one order, so a request may move between machines."""
    torch.manual_seed(0)
    weight, bias, x = _weight(quantization, 70, 290), torch.randn(70), torch.randn(53, 290)
    results = [_packed(weight, bias, kind=kind)(x) for kind in NATIVE_KINDS]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_threads_change_no_bit(kind: str, quantization: str) -> None:
    torch.manual_seed(0)
    kernels, packed = kernels_of(kind), _packed(_weight(quantization, 960, 576), kind=kind)
    x = torch.randn(130, 576)
    try:
        results = []
        for threads in (1, 2, 3, 5):
            kernels.set_threads(threads)
            results.append(packed(x))
    finally:
        kernels.set_threads(torch.get_num_threads())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_packing_keeps_nothing_of_the_tensors_given(kind: str, quantization: str) -> None:
    """Loading overwrites and drops tensors after packing; a layer that still used them would change."""
    x, weight, bias = torch.randn(3, 32), _weight(quantization, 16, 32), torch.randn(16)
    packed = _packed(weight, bias, kind=kind)
    before = packed(x)
    for tensor in (weight.values_OI, weight.scales_OG, bias):
        tensor.zero_()
    assert torch.equal(packed(x), before)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_without_the_kernels_floats_of_the_same_weights_compute(quantization: str) -> None:
    torch.manual_seed(0)
    weight, x = _weight(quantization, 33, 70), torch.randn(4, 70)
    y = PackedLinear(weight, None, path_of("torch", torch.float32))(x)
    torch.testing.assert_close(y.double(), linear(x, dequantize(weight), None), rtol=1e-5, atol=1e-5)
