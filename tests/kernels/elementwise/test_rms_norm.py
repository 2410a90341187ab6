import pytest
import torch

from kernels.elementwise.rms_norm import add_rms_norm_, reference, rms_norm
from tests.support.kernels.kernel_paths import KINDS, path_of


def test_agrees_with_float64() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 96) * 30, torch.randn(96)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=2e-6, atol=2e-6)


def test_eps_counts_for_tiny_inputs() -> None:
    """With x^2 far below eps the result is x / sqrt(eps): a norm that clamps instead of adding eps fails here."""
    x = torch.full((2, 8), 1e-4)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5).double(), reference.rms_norm(x, torch.ones(8), 1e-5))


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 96).bfloat16(), torch.randn(96)
    y = rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, reference.rms_norm(x, weight, 1e-5).float().bfloat16())


def test_heads_have_weights_of_their_own_and_input_is_left_alone() -> None:
    """q and k norms run over strided heads, each with its own weight."""
    torch.manual_seed(0)
    wide = torch.randn(5, 60)
    heads, weight = wide[:, :48].unflatten(1, (3, 16)), torch.randn(3, 16)
    before = wide.clone()
    y = rms_norm(heads, weight, 1e-6)
    torch.testing.assert_close(y.double(), reference.rms_norm(heads, weight, 1e-6), rtol=2e-6, atol=2e-6)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 96), (37, 70), (2, 5)])
def test_a_norm_is_added_in_place(kind: str, shape: tuple[int, int]) -> None:
    """Rows of several tasks, and rows that fill no vector. A row's bits do not depend on the batch."""
    torch.manual_seed(0)
    x, y, weight = torch.randn(shape) * 30, torch.randn(shape), torch.randn(shape[1])
    expected, before = y + reference.rms_norm(x, weight, 1e-5), x.clone()
    kernels = path_of(kind, torch.float32).native
    last = y[-1:].clone()
    add_rms_norm_(y, x, weight, 1e-5, kernels)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(x, before)
    if kernels is not None:
        add_rms_norm_(last, x[-1:].contiguous(), weight, 1e-5, kernels)
        assert torch.equal(last, y[-1:])
