"""The helpers that all Triton kernels use, against torch."""

import pytest
import torch
import triton.language as tl

from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, e4m3_halves, narrow, widen, widen_to
from tests.support.gpu.gpu import DEVICE


@jit
def _dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.full((M, N), 1.0, tl.float32)
    acc = dot(tl.load(a + m[:, None] * K + k[None]), tl.load(b + k[:, None] * N + n[None]), acc)
    tl.store(out + m[:, None] * N + n[None], acc)


@jit
def _narrow_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, narrow(tl.load(x + n), out.dtype.element_ty))


@jit
def _widen_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, widen(tl.load(x + n)))


@jit
def _widen_to_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, widen_to(tl.load(x + n), out.dtype.element_ty))


@jit
def _halves_kernel(pairs, out, N: tl.constexpr, FORM: tl.constexpr):
    n = tl.arange(0, N)
    low, high = e4m3_halves(tl.load(pairs + n), FORM)
    tl.store(out + 2 * n, low)
    tl.store(out + 2 * n + 1, high)


def _has_fp8() -> bool:
    return DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_dot_adds_exact_products(dtype: torch.dtype) -> None:
    """The interpreter's own bf16 dot is wrong by 1e10; a GPU's float32 dot would round to tf32."""
    if dtype is torch.float8_e4m3fn and not _has_fp8():
        pytest.skip("a GPU without e4m3")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in ((16, 64), (64, 32)))
    out = torch.full((16, 32), float("nan"), device=DEVICE)
    _dot_kernel[(1,)](a, b, out, 16, 32, 64)
    torch.testing.assert_close(out.double(), a.double() @ b.double() + 1, rtol=1e-5, atol=2e-5)


def _awkward_numbers() -> torch.Tensor:
    """Numbers of all sizes, every e4m3 number, the midpoints between these, and the midpoints' neighbours."""
    random = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 1024)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    up, down = (torch.nextafter(halfway, torch.tensor(toward)) for toward in (float("inf"), 0.0))
    positive = torch.cat((random, codes, halfway, up, down))
    both = torch.cat((positive, -positive))
    return torch.cat((both, torch.zeros(4096 - len(both))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rounds_to_nearest(dtype: torch.dtype) -> None:
    x = _awkward_numbers().to(DEVICE)
    out = torch.full((4096,), float("nan"), dtype=dtype, device=DEVICE)
    _narrow_kernel[(1,)](x, out, 4096)
    assert torch.equal(out, x.to(dtype))


@pytest.mark.parametrize("as_bits", [True, False])
def test_narrow_to_e4m3_rounds_and_saturates(as_bits: bool) -> None:
    """This also holds on GPUs without an instruction for it. torch's cast turns large numbers to NaN, so the test
    clamps first."""
    if not as_bits and not _has_fp8():
        pytest.skip("a GPU without e4m3")
    x = _awkward_numbers().to(DEVICE)
    x[-3:] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    out = torch.full((4096,), 0x55, dtype=torch.uint8, device=DEVICE)
    _narrow_kernel[(1,)](x, out if as_bits else out.view(torch.float8_e4m3fn), 4096)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_bits", [True, False])
def test_widening_e4m3_is_exact(dtype: torch.dtype, as_bits: bool) -> None:
    if not as_bits and not _has_fp8():
        pytest.skip("a GPU without e4m3")
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    # The two codes of NaN are left out: their bits do not become NaN in fp16.
    codes[[0x7F, 0xFF]] = 0
    out = torch.full((256,), float("nan"), dtype=dtype, device=DEVICE)
    kernel = _widen_kernel if dtype is torch.float32 else _widen_to_kernel
    kernel[(1,)](codes if as_bits else codes.view(torch.float8_e4m3fn), out, 256)
    assert torch.equal(out.float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("form", ["bits", "cvt"])
def test_pairs_of_e4m3_are_exact(form: str) -> None:
    """Every number in either half, beside every other. The instruction needs a GPU."""
    if form == "cvt" and (DEVICE == "cpu" or not _has_fp8()):
        pytest.skip("no GPU that converts e4m3")
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[[0x7F, 0xFF]] = 0
    pairs = torch.cartesian_prod(codes, codes).flatten()
    out = torch.full((len(pairs),), float("nan"), dtype=torch.float16, device=DEVICE)
    _halves_kernel[(1,)](pairs.view(torch.uint16), out, len(pairs) // 2, form)
    assert torch.equal(out.float(), pairs.view(torch.float8_e4m3fn).float())
