"""The GPU's RMS norm, against float64 and against its unfused parts."""

import pytest
import torch

from kernels.elementwise.rms_norm import reference
from kernels.elementwise.rms_norm.triton import (
    rms_norm,
    rms_norm_quantize_groups,
    rms_norm_quantize_tokens,
)
from kernels.gemm.quantize import reference as quantize
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded, assert_same_e4m3

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
# On a GPU the fused and the unfused kernel may add a row's squares in different orders, and the last bit of the norm
# may move a number halfway between two e4m3 values to the other. The interpreter has one order.
ULPS = 0 if DEVICE == "cpu" else 1


def _rows(num_tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows in wider memory whose rest is NaN, so that reads beyond a row's end show."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, size + 16), float("nan"))
    wide[:, :size] = torch.randn(num_tokens, size, generator=generator) * 3
    return wide.to(dtype).to(DEVICE)[:, :size]


def _weight(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight that is followed by NaN in memory, too."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.cat((torch.randn(size, generator=generator), torch.full((16,), float("nan"))))
    return weight.to(dtype).to(DEVICE)[:size]


@pytest.mark.parametrize("size", [1, 65, 576, 2880, 7168])
@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_float64(dtype: torch.dtype, size: int) -> None:
    x, weight = _rows(3, size, dtype), _weight(size)
    before, out = x.clone(), torch.full((3, size), float("nan"), dtype=dtype, device=DEVICE)
    assert rms_norm(x, weight, EPS, out=out) is out
    # A mean of squares in float32 and a handful of roundings; on a GPU, an approximate reciprocal root besides.
    assert_rounded(out, reference.rms_norm(x.cpu(), weight.cpu(), EPS), error=1e-6)
    assert torch.equal(x, before)


def test_eps_counts_for_tiny_inputs() -> None:
    x = torch.full((2, 8), 1e-4, device=DEVICE)
    out = rms_norm(x, torch.ones(8, device=DEVICE), EPS)
    assert_rounded(out, reference.rms_norm(x.cpu(), torch.ones(8), EPS), error=1e-6)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [576, 2881])
def test_residual_is_added_in_place_and_normed_as_stored(size: int, residual_dtype: torch.dtype) -> None:
    x, residual, weight = _rows(3, size, torch.bfloat16), _rows(3, size, residual_dtype, seed=1), _weight(size)
    total = (x.float() + residual.float()).to(residual_dtype)
    out = rms_norm(x, weight, EPS, residual_TN=residual)
    assert torch.equal(residual, total)
    assert_rounded(out, reference.rms_norm(total.cpu(), weight.cpu(), EPS), error=1e-6)


@pytest.mark.parametrize("size", [576, 2881])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_stream_is_normed_as_it_is_and_rounded_once(dtype: torch.dtype, size: int) -> None:
    """As in layers: a linear's output is added to the stream; the first layer norms the stream with nothing to add."""
    x, stream, weight = _rows(3, size, dtype), _rows(3, size, torch.float32, seed=1), _weight(size, dtype)
    total = x.float() + stream
    y = rms_norm(x, weight, EPS, residual_TN=stream, out_dtype=dtype)
    assert torch.equal(stream, total)
    assert y.dtype is dtype
    # On a GPU the last bit may differ: loads of x and of the stream may spread a row differently over threads.
    torch.testing.assert_close(rms_norm(stream, weight, EPS, out_dtype=dtype), y, rtol=2**-7 * ULPS, atol=0)
    assert torch.equal(rms_norm(stream, weight, EPS).to(dtype), rms_norm(stream, weight, EPS, out_dtype=dtype))
    assert_rounded(y, reference.rms_norm(total.cpu(), weight.cpu(), EPS), error=1e-6)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_float32_stream_is_quantized_as_its_rounded_norm(with_residual: bool) -> None:
    stream, weight = _rows(3, 576, torch.float32, seed=1), _weight(576)
    x, residual = (_rows(3, 576, torch.bfloat16), stream) if with_residual else (stream, None)
    total = x.float() + stream if with_residual else stream.clone()
    y = rms_norm(total, weight, EPS, out_dtype=torch.bfloat16).cpu()
    for op, quantized in (
        (rms_norm_quantize_tokens, quantize.quantize_tokens),
        (rms_norm_quantize_groups, quantize.quantize_groups),
    ):
        # Each changes the stream that it adds to.
        own = None if residual is None else residual.clone()
        q, scales = op(x, weight, EPS, residual_TN=own, out_dtype=torch.bfloat16)
        expected_q, expected_scales = quantized(y)
        torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2**-7 if ULPS else 0, atol=0)
        assert_same_e4m3(q, expected_q, ulps=ULPS)
        assert own is None or torch.equal(own, total)


def test_result_may_replace_the_input() -> None:
    x, weight = _rows(3, 576, torch.bfloat16), _weight(576, torch.bfloat16)
    expected = rms_norm(x, weight, EPS)
    rms_norm(x, weight, EPS, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [128, 576, 2880])
def test_quantized_by_token_is_the_norm_quantized(size: int, power_of_two: bool) -> None:
    x, residual, weight = _rows(3, size, torch.bfloat16), _rows(3, size, torch.bfloat16, seed=1), _weight(size)
    other = residual.clone()
    unfused = rms_norm(x, weight, EPS, residual_TN=other)
    q, scales = rms_norm_quantize_tokens(x, weight, EPS, residual_TN=residual, power_of_two=power_of_two)
    expected_q, expected_scales = quantize.quantize_tokens(unfused.cpu(), power_of_two=power_of_two)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2**-7 if ULPS else 0, atol=0)
    assert_same_e4m3(q, expected_q, ulps=ULPS)
    assert torch.equal(residual, other)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [100, 576, 2880])
def test_quantized_by_group_is_the_norm_quantized(size: int, power_of_two: bool) -> None:
    x, weight = _rows(3, size, torch.bfloat16), _weight(size)
    x[1, : size // 2] *= 1e-3  # groups with scales far apart
    q, scales = rms_norm_quantize_groups(x, weight, EPS, power_of_two=power_of_two)
    expected_q, expected_scales = quantize.quantize_groups(rms_norm(x, weight, EPS).cpu(), power_of_two=power_of_two)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2**-7 if ULPS else 0, atol=0)
    assert_same_e4m3(q, expected_q, ulps=ULPS)
    assert scales.stride() == (1, 3)


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = _rows(3, 300, torch.bfloat16), _weight(300)
    expected_q, expected_scales = rms_norm_quantize_groups(x, weight, EPS)
    x[1, 7] = float("nan")
    q, scales = rms_norm_quantize_groups(x, weight, EPS)
    assert scales[1].isnan().all()
    assert q[1].float().isnan().all()
    assert torch.equal(scales[[0, 2]], expected_scales[[0, 2]])
    assert torch.equal(q.view(torch.uint8)[[0, 2]], expected_q.view(torch.uint8)[[0, 2]])


@pytest.mark.parametrize("size", [576, 2880])
def test_a_row_does_not_depend_on_its_batch(size: int) -> None:
    x, weight = _rows(7, size, torch.bfloat16), _weight(size)
    for alone in (0, 3, 6):
        row = x[alone : alone + 1]
        assert torch.equal(rms_norm(row, weight, EPS)[0], rms_norm(x, weight, EPS)[alone])
        for op in (rms_norm_quantize_tokens, rms_norm_quantize_groups):
            (q_alone, scales_alone), (q, scales) = op(row, weight, EPS), op(x, weight, EPS)
            assert torch.equal(q_alone.view(torch.uint8)[0], q.view(torch.uint8)[alone])
            assert torch.equal(scales_alone[0], scales[alone])


def test_no_rows_are_fine() -> None:
    q, scales = rms_norm_quantize_groups(_rows(0, 256, torch.bfloat16), _weight(256), EPS)
    assert (q.shape, scales.shape) == ((0, 256), (0, 2))


def test_what_does_not_fit_is_refused() -> None:
    x = _rows(2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="a row of x has 64 numbers"):
        rms_norm(x, _weight(63), EPS)
    with pytest.raises(ValueError, match="residual of shape"):
        rms_norm(x, _weight(64), EPS, residual_TN=x[:1])
    with pytest.raises(ValueError, match="1 to 32768 columns"):
        rms_norm(torch.empty(1, 32769, device=DEVICE), torch.empty(32769, device=DEVICE), EPS)
    with pytest.raises(ValueError, match="a norm is rounded to one of"):
        rms_norm(x, _weight(64), EPS, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="out of shape"):
        rms_norm(x, _weight(64), EPS, out=torch.empty(2, 64, device=DEVICE))
