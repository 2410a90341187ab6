import torch

from kernels.elementwise.silu_mul import reference, silu_mul


def test_agrees_with_float64() -> None:
    """The gate is the first half: swapped halves, or a gate without its sigmoid, are off by far more than 1e-6."""
    torch.manual_seed(0)
    gate_up = torch.randn(5, 64) * 4
    torch.testing.assert_close(silu_mul(gate_up).double(), reference.silu_mul(gate_up), rtol=1e-5, atol=1e-6)


def test_gelu_agrees_with_float64() -> None:
    """GELU in its tanh form; the erf form is off by up to 5e-4."""
    torch.manual_seed(0)
    gate_up = torch.randn(5, 64) * 4
    expected = reference.gelu_tanh_mul(gate_up)
    torch.testing.assert_close(silu_mul(gate_up, activation="gelu_tanh").double(), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_once() -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(5, 64) * 4).bfloat16()
    y = silu_mul(gate_up)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), reference.silu_mul(gate_up), rtol=2**-8, atol=1e-6)


def test_clamped_swiglu_agrees_with_float64() -> None:
    """Some gates and ups lie beyond the limits of 7."""
    torch.manual_seed(0)
    gate_up = torch.randn(5, 64) * 8
    assert (gate_up.abs() > 7).any()
    expected = reference.clamped_swiglu(gate_up)
    got = silu_mul(gate_up, activation="clamped_swiglu").double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
