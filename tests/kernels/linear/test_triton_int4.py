"""Linear layers of 4-bit weights on a GPU against unfused formulas, and the kinds of layers that PackedLinear makes."""

import pytest
import torch

from kernels.backend import GpuBackend, gpu_backend
from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.silu_mul.reference import silu_mul
from kernels.linear import PackedLinear, Residual
from kernels.linear.triton_int4 import GpuInt4Linear
from kernels.linear.weights import Int4Weight, concatenate, dequantize, map_rows, num_groups, quantize_int4
from tests.support.gpu.gpu import DEVICE

EPS = 1e-5


def _weight(num_outputs: int, num_inputs: int, *, has_zeros: bool = True, seed: int = 0) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    weight = quantize_int4(torch.randn(num_outputs, num_inputs, generator=generator))
    if not has_zeros:
        return weight
    zeros = torch.randint(17, (num_outputs, num_groups(num_inputs)), generator=generator, dtype=torch.int8)
    return Int4Weight(values_OI=weight.values_OI, scales_OG=weight.scales_OG, minima_OG=zeros)


def _linear(weight: Int4Weight, norm: torch.Tensor | None = None, *, gated: bool = False) -> GpuInt4Linear:
    gpu = GpuBackend(device=torch.device(DEVICE))
    return GpuInt4Linear(weight, None, norm, EPS, gated=gated, dtype=torch.float32, gpu=gpu)


def _inputs(num_tokens: int, size: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(seed))


def _assert_near(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of 300 products in float32."""
    assert (y.double().cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("is_pending", [False, True])
def test_norm_gate_and_the_pending_sum(is_pending: bool, has_zeros: bool) -> None:
    weight, norm = _weight(80, 300, has_zeros=has_zeros), _inputs(1, 300)[0]
    x, delta = _inputs(3, 300), _inputs(3, 300, 6)
    residual = Residual(x.to(DEVICE).clone(), delta.to(DEVICE), is_pending=is_pending)
    normed = rms_norm(x + delta if is_pending else x, norm, EPS).double()
    expected = silu_mul(normed @ dequantize(weight).double().T)
    linear = _linear(weight, norm, gated=True)
    assert linear.num_outputs == 40
    _assert_near(linear(residual), expected)


def test_a_result_is_left_pending_and_the_largest_output_is_found() -> None:
    weight, x = _weight(70, 96), _inputs(3, 96).to(DEVICE)
    residual = Residual(torch.zeros(3, 70, device=DEVICE), torch.full((3, 70), torch.nan, device=DEVICE))
    linear = _linear(weight)
    linear.add_to_(residual, x)
    assert residual.is_pending
    assert torch.equal(residual.delta_TE, linear(x))
    ids, values = linear.argmax(x, None)
    assert torch.equal(ids, linear(x).argmax(1))
    assert torch.equal(values, linear(x).amax(1))


def test_a_packed_linear_keeps_4_bits() -> None:
    path, weight = gpu_backend(torch.float32, torch.device(DEVICE)), _weight(48, 64)
    parts = [
        Int4Weight(values_OI=weight.values_OI[part], scales_OG=weight.scales_OG[part], minima_OG=weight.minima_OG[part])
        for part in (slice(0, 32), slice(32, 48))
    ]
    linear = PackedLinear(parts, None, path)
    assert linear.num_bytes == 48 * (32 + 4 + 4)
    x = _inputs(2, 64)
    _assert_near(linear(x.to(DEVICE)), x.double() @ dequantize(weight).double().T)


def test_parts_with_zeros_join_and_floats_beside_them_make_floats() -> None:
    first, second = _weight(16, 64), _weight(8, 64, seed=1)
    whole = concatenate([first, second])
    assert isinstance(whole, Int4Weight)
    assert whole.has_zeros
    assert torch.equal(dequantize(whole), torch.cat([dequantize(first), dequantize(second)]))
    floats = torch.randn(4, 64).bfloat16()
    beside = concatenate([first, floats])
    assert isinstance(beside, torch.Tensor)
    assert torch.equal(beside, torch.cat([dequantize(first).bfloat16(), floats]))
    assert torch.equal(dequantize(map_rows(first, lambda rows: rows.flip(0))), dequantize(first).flip(0))
