"""The GPU's gated activations, against float64 and against their unfused parts."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise.silu_mul import Activation, reference
from kernels.elementwise.silu_mul.triton import silu_mul, silu_mul_quantize_groups, silu_mul_quantize_tokens
from kernels.gemm.quantize import reference as quantize
from tests.support.gpu.gpu import DEVICE
from tests.support.kernels.rounding import assert_rounded, assert_same_e4m3

REFERENCES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": reference.silu_mul,
    "gelu_tanh": reference.gelu_tanh_mul,
    "clamped_swiglu": reference.clamped_swiglu,
}
# On a GPU the fused and the unfused kernel may be compiled to different instructions around exp, and the last bit of
# the activation may move a number halfway between two e4m3 values to the other.
ULPS = 0 if DEVICE == "cpu" else 1


def _gate_up(num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in wider memory whose rest is NaN, so that reads beyond a row's end show."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((num_tokens, 2 * size + 16), float("nan"))
    wide[:, : 2 * size] = torch.randn(num_tokens, 2 * size, generator=generator) * 3
    return wide.to(dtype).to(DEVICE)[:, : 2 * size]


@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("size", [1, 300, 1024, 2881])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_float64(dtype: torch.dtype, size: int, activation: Activation) -> None:
    gate_up = _gate_up(3, size, dtype)
    out = torch.full((3, size), float("nan"), dtype=dtype, device=DEVICE)
    assert silu_mul(gate_up, activation=activation, out=out) is out
    # exp of an argument of up to about 60, which float32 holds to 2^-24 of its size (on a GPU, multiplied by log2(e)).
    assert_rounded(out, REFERENCES[activation](gate_up.cpu()), error=1e-5)


def test_reference_is_the_tanh_form() -> None:
    gate_up = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).double()
    expected = F.gelu(gate_up[:, :32], approximate="tanh") * gate_up[:, 32:]
    torch.testing.assert_close(reference.gelu_tanh_mul(gate_up), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size_are_finite(activation: Literal["silu", "gelu_tanh"]) -> None:
    """exp(-gate) of a large negative gate would overflow."""
    gate = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 1e4]], device=DEVICE)
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), activation=activation)
    torch.testing.assert_close(out, gate.clamp_min(0), rtol=0, atol=1e-30)


def test_result_may_replace_the_gate() -> None:
    gate_up = _gate_up(2, 1100, torch.bfloat16)
    expected = silu_mul(gate_up)
    silu_mul(gate_up, out=gate_up[:, :1100])
    assert torch.equal(gate_up[:, :1100], expected)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [1, 300, 8200])
def test_quantized_by_token_is_the_product_quantized(size: int, power_of_two: bool) -> None:
    """8200 numbers are more than a program keeps in registers, so they are computed twice."""
    gate_up = _gate_up(3, size, torch.bfloat16)
    q, scales = silu_mul_quantize_tokens(gate_up, power_of_two=power_of_two)
    expected_q, expected_scales = quantize.quantize_tokens(silu_mul(gate_up).cpu(), power_of_two=power_of_two)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2**-7 if ULPS else 0, atol=0)
    assert_same_e4m3(q, expected_q, ulps=ULPS)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [100, 384, 1300])
def test_quantized_by_group_is_the_product_quantized(
    size: int, power_of_two: bool, activation: Literal["silu", "gelu_tanh"]
) -> None:
    gate_up = _gate_up(3, size, torch.bfloat16)
    q, scales = silu_mul_quantize_groups(gate_up, activation=activation, power_of_two=power_of_two)
    unfused = silu_mul(gate_up, activation=activation).cpu()
    expected_q, expected_scales = quantize.quantize_groups(unfused, power_of_two=power_of_two)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2**-7 if ULPS else 0, atol=0)
    assert_same_e4m3(q, expected_q, ulps=ULPS)
    assert scales.stride() == (1, 3)


@pytest.mark.parametrize("size", [300, 1300])
def test_a_row_does_not_depend_on_its_batch(size: int) -> None:
    gate_up = _gate_up(5, size, torch.bfloat16)
    for alone in (0, 4):
        row = gate_up[alone : alone + 1]
        assert torch.equal(silu_mul(row)[0], silu_mul(gate_up)[alone])
        for op in (silu_mul_quantize_tokens, silu_mul_quantize_groups):
            (q_alone, scales_alone), (q, scales) = op(row), op(gate_up)
            assert torch.equal(q_alone.view(torch.uint8)[0], q.view(torch.uint8)[alone])
            assert torch.equal(scales_alone[0], scales[alone])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="even number of columns"):
        silu_mul(torch.zeros(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match=r"\(2, 4\) of torch.float32"):
        silu_mul(torch.zeros(2, 8, device=DEVICE), out=torch.zeros(2, 8, device=DEVICE))
    with pytest.raises(ValueError, match="activation='relu'"):
        silu_mul(torch.zeros(2, 8, device=DEVICE), activation="relu")  # pyright: ignore[reportArgumentType]
