"""Quantization to e4m3 against its formulas, bit by bit; and guarantees that callers rely on."""

from collections.abc import Callable

import pytest
import torch

from kernels.gemm.quantize import reference
from kernels.gemm.quantize import triton as gpu
from tests.support.gpu.gpu import DEVICE

Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]

GRAINS = ("tokens", "groups", "blocks")
# A single number; a whole group; odd sizes; one more than two groups and a tile of rows.
SHAPES = ((1, 1), (1, 128), (3, 130), (17, 257))


def quantize(module: object, grain: str) -> Quantize:
    return getattr(module, f"quantize_{grain}")


def numbers(M: int, K: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes from 1e-3 to 1e2, so that groups have different scales and small numbers become subnormal."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M * 1000 + K)) * torch.logspace(-3, 2, K)
    return x.to(dtype).to(DEVICE)


def bits(q: torch.Tensor) -> torch.Tensor:
    assert q.dtype is torch.float8_e4m3fn
    return q.view(torch.uint8)


def assert_same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)
    # NaN has two codes, which mean the same.
    is_nan = expected[0].float().isnan()
    assert torch.equal(actual[0].float().isnan(), is_nan)
    assert torch.equal(bits(actual[0])[~is_nan], bits(expected[0])[~is_nan])


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_formula(grain: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Division and rounding are exact operations of float32, so there is no tolerance."""
    x = numbers(*shape, dtype=dtype)
    assert_same(quantize(gpu, grain)(x), quantize(reference, grain)(x))


@pytest.mark.parametrize(("grain", "shape"), [("groups", (65, 257)), ("groups", (81, 128)), ("blocks", (129, 129))])
def test_bits_of_several_tiles(grain: str, shape: tuple[int, int]) -> None:
    x = numbers(*shape)
    assert_same(quantize(gpu, grain)(x), quantize(reference, grain)(x))


@pytest.mark.parametrize("grain", GRAINS)
def test_scales_that_are_powers_of_two(grain: str) -> None:
    x = numbers(33, 300)
    # The scales of 448 and 224 are powers of two already; the number just above 224 must get the next power.
    x[0] = 448.0
    x[1] = torch.nextafter(torch.tensor(224.0), torch.tensor(448.0))
    actual = quantize(gpu, grain)(x, power_of_two=True)
    assert torch.frexp(actual[1]).mantissa.eq(0.5).all()
    assert (x.abs() <= 448 * scale_of_each(grain, x, actual[1])).all()
    assert_same(actual, quantize(reference, grain)(x, power_of_two=True))


def scale_of_each(grain: str, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return reference.spread(scales, _block(grain, x), (len(x), x.shape[1]))


def _block(grain: str, x: torch.Tensor) -> tuple[int, int]:
    return {"tokens": (1, x.shape[1]), "groups": (1, 128), "blocks": (128, 128)}[grain]


@pytest.mark.parametrize("grain", GRAINS)
def test_what_is_quantized_is_close(grain: str) -> None:
    """Half a step of e4m3 is 1/16 of a number, or 2^-10 of the scale for subnormal numbers. Two float32 roundings are
    added."""
    x = numbers(19, 300)
    q, scales = quantize(gpu, grain)(x)
    scale = scale_of_each(grain, x, scales).double()
    bound = torch.maximum(x.double().abs() / 16, scale / 1024) * (1 + 1e-6)
    assert ((q.double() * scale - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("grain", GRAINS)
def test_zeros_have_a_finite_scale(grain: str) -> None:
    q, scales = quantize(gpu, grain)(torch.zeros(3, 200, device=DEVICE))
    assert not bits(q).any()
    assert torch.equal(scales, torch.full_like(scales, 1e-10) / torch.full_like(scales, 448))
    assert (1 / scales).isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("grain", GRAINS)
def test_what_is_not_finite_is_not_hidden(grain: str, value: float) -> None:
    """Every number that shares a scale with it becomes NaN, and no other."""
    # With blocks, the last row has a block of its own.
    last = 128 if grain == "blocks" else 18
    x = numbers(last + 1, 300)
    x[last, 140] = value
    actual = quantize(gpu, grain)(x)
    expected_nan = torch.zeros(last + 1, 300, dtype=torch.bool, device=DEVICE)
    rows, columns = _block(grain, x)
    expected_nan[last // rows * rows :, 140 // columns * columns : (140 // columns + 1) * columns] = True
    assert torch.equal(actual[0].float().isnan(), expected_nan)
    assert int(actual[1].isnan().sum()) == 1


@pytest.mark.parametrize("grain", ["tokens", "groups"])
def test_a_row_does_not_depend_on_its_batch(grain: str) -> None:
    """65 rows are computed in other tiles than a single one."""
    x = numbers(65, 257)
    q, scales = quantize(gpu, grain)(x)
    for row in (0, 31, 64):
        alone_q, alone_scales = quantize(gpu, grain)(x[row : row + 1])
        assert torch.equal(bits(alone_q), bits(q[row : row + 1]))
        assert torch.equal(alone_scales, scales[row : row + 1])


@pytest.mark.parametrize("grain", GRAINS)
def test_rows_of_a_wider_matrix(grain: str) -> None:
    """The memory between the rows is NaN and must not be read."""
    wide = torch.full((19, 400), float("nan"), device=DEVICE)
    wide[:, :257] = numbers(19, 257)
    assert_same(quantize(gpu, grain)(wide[:, :257]), quantize(gpu, grain)(wide[:, :257].contiguous()))


def test_rows_longer_than_a_tile() -> None:
    """Rows are read twice: the largest number is in the last tile of one row and in the first of the other."""
    x = numbers(2, 8200)
    x[0, 8199], x[1, 0] = 1e4, 1e4
    assert_same(gpu.quantize_tokens(x), reference.quantize_tokens(x))


def test_layouts_of_scales() -> None:
    x = numbers(33, 300)
    assert gpu.quantize_tokens(x)[1].shape == (33, 1)
    scales_MG = gpu.quantize_groups(x)[1]
    assert (scales_MG.shape, scales_MG.stride()) == ((33, 3), (1, 33))
    blocks = gpu.quantize_blocks(x)[1]
    assert (blocks.shape, blocks.stride()) == ((1, 3), (4, 1))


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("shape", [(0, 128), (5, 0)])
def test_nothing_to_quantize(grain: str, shape: tuple[int, int]) -> None:
    q, scales = quantize(gpu, grain)(torch.empty(shape, device=DEVICE))
    assert q.shape == shape
    assert scales.isfinite().all()


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), r"x of shape \(4,\)"),
        (torch.zeros(2, 4, dtype=torch.int32), r"torch\.int32"),
        (torch.zeros(4, 2).t(), r"strides \(1, 2\)"),
    ],
)
def test_what_cannot_be_quantized_is_said(x: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gpu.quantize_tokens(x)


def test_a_gpu_without_e4m3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gemm.quantize import checks

    checks._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"A100 has compute capability 8\.0, FP8 needs 8\.9"):
        checks.check_device(torch.device("cuda", 0))
    checks._capability.cache_clear()
