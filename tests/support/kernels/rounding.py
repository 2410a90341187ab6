"""Asserts that a kernel's output is close enough to the exact result."""

import torch


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, *, error: float) -> None:
    """actual is the exact result with an error of `error`, relative to its row's largest number, and rounded once.

    exact: float64. Rounding to nearest is off by at most half a unit in the last place: eps / 2 of the number, or of
    the smallest normal number if the number is smaller.
    """
    assert actual.isfinite().all()
    dtype = torch.finfo(actual.dtype)
    computed = error * exact.abs().amax(-1, keepdim=True)
    allowed = dtype.eps / 2 * exact.abs().clamp_min(dtype.tiny) + computed * (1 + dtype.eps)
    off = (actual.double().cpu() - exact).abs()
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.3g} times what rounding explains"


def assert_same_e4m3(actual: torch.Tensor, expected: torch.Tensor, *, ulps: int) -> None:
    """Both are float8_e4m3fn and at most `ulps` of its numbers apart; NaN is where it is expected."""
    assert actual.dtype is expected.dtype is torch.float8_e4m3fn
    actual_order, expected_order = (_order(x.cpu()) for x in (actual, expected))
    far = (actual_order - expected_order).abs() > ulps
    assert not far.any(), f"{far.sum()} of {far.numel()} differ, first at {far.nonzero()[0].tolist()}"


def _order(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of e4m3's numbers; NaN is far beyond all others."""
    bits = x.contiguous().view(torch.uint8).int()
    size = bits & 0x7F
    size = torch.where(size == 0x7F, 1000, size)
    return torch.where(bits >= 0x80, -size, size)
