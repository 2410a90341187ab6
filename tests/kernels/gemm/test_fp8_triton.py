"""FP8 GEMM against the formula in float64, for all layouts of scales and many tiles; and the independence of a row
from its batch."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.gemm.fp8 import dispatch as gpu
from kernels.gemm.fp8 import reference
from kernels.gemm.fp8.choose import BATCH_INVARIANT_TILE, Device, default_tile
from kernels.gemm.fp8.dispatch import fp8_gemm, fp8_gemm_choice
from kernels.gemm.fp8.scaled_mm import _block_scales, scaled_mm
from kernels.gemm.fp8.triton import triton_gemm
from kernels.gemm.fp8.tuned_files import file_name
from kernels.gemm.quantize import reference as quantize
from kernels.gemm.quantize.triton import quantize_blocks
from kernels.triton_common.tuned_tiles import Tile, write_tiles
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.reads import reads_of

SCALES = ("tensor", "channel", "token-tensor", "tensor-channel", "block")
# One of each; whole tiles; odd sizes; one more than a tile of rows, a block of outputs and two groups of inputs.
SHAPES = ((1, 1, 16), (16, 128, 256), (3, 17, 130), (17, 129, 257))
SMALL = Tile(block_m=16, block_n=64, block_k=128)


@dataclass(frozen=True)
class Arguments:
    x: torch.Tensor
    weight: torch.Tensor
    x_scales: torch.Tensor
    weight_scales: torch.Tensor

    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.weight, self.x_scales, self.weight_scales

    def rows(self, chosen: slice) -> "Arguments":
        scales = self.x_scales if self.x_scales.numel() == 1 else self.x_scales[chosen]
        return Arguments(self.x[chosen], self.weight, scales, self.weight_scales)

    def expected(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        return reference.fp8_gemm(*self.all(), bias_N=bias)


def arguments(shape: tuple[int, int, int], scales: str) -> Arguments:
    """Rows, columns and groups differ greatly in magnitude, so that a wrong scale shows."""
    M, N, K = shape
    generator = torch.Generator().manual_seed(M * N * K)
    x = torch.randn(M, K, generator=generator) * torch.logspace(-1, 1, M)[:, None] * torch.logspace(1, -1, K)
    weight = torch.randn(N, K, generator=generator) * torch.logspace(1, -1, N)[:, None] * torch.logspace(0, 1, K)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    x_kind, weight_kind = {
        "tensor": ("tensor", "tensor"),
        "channel": ("tokens", "tokens"),
        "token-tensor": ("tokens", "tensor"),
        "tensor-channel": ("tensor", "tokens"),
        "block": ("groups", "blocks"),
    }[scales]
    q_x, x_scales = getattr(quantize, f"quantize_{x_kind}")(x)
    q_weight, weight_scales = getattr(quantize, f"quantize_{weight_kind}")(weight)
    if scales == "block":
        x_scales = x_scales.t().contiguous().t()
    return Arguments(q_x, q_weight, x_scales, weight_scales)


def exact_arguments(shape: tuple[int, int, int], scales: str) -> Arguments:
    """Numbers whose products are multiples of 1/64 and add up to less than 2^24 of these: float32 sums are the same in
    any order. Only the kernel's own operations round; the interpreter's dots differ with a row's place in its tile."""
    generator = torch.Generator().manual_seed(0)

    def numbers(like: torch.Tensor) -> torch.Tensor:
        eighths = torch.randint(-120, 121, like.shape, generator=generator)
        return (eighths / 8).to(torch.float8_e4m3fn).to(DEVICE)

    given = arguments(shape, scales)
    return dataclasses.replace(given, x=numbers(given.x), weight=numbers(given.weight))


def assert_close(y: torch.Tensor, of: Arguments, bias: torch.Tensor | None = None) -> None:
    """The bound is what float32 loses, relative to the sum of magnitudes (2^-24 for each of K additions and three
    products with scales, and a bit for partial sums), plus one rounding to the output's dtype."""
    sizes = Arguments(of.x.float().abs(), of.weight.float().abs(), of.x_scales, of.weight_scales).expected()
    expected = of.expected(bias)
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    bound = (sizes + expected.abs()) * (of.x.shape[1] + 4) * 2**-23 + expected.abs() * rounding
    if DEVICE == "cuda":
        # wgmma, which tiles of 64 rows and more take, keeps some 14 bits of a sum of up to 128 products.
        bound += sizes * 2**-13
    if y.dtype is torch.float16:
        # Subnormal float16 numbers.
        bound += 2**-24
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_formula(shape: tuple[int, int, int], scales: str) -> None:
    given = arguments(shape, scales)
    assert_close(fp8_gemm(*given.all(), out_dtype=torch.float32, tile=SMALL), given)


@pytest.mark.parametrize("scales", ["channel", "block"])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(block_m=64, block_n=128, block_k=128),
        # A tile over two blocks of the weight; two tiles in a group.
        Tile(block_m=16, block_n=256, block_k=128),
        Tile(block_m=32, block_n=32, block_k=64),
        Tile(block_m=16, block_n=64, block_k=32, group_m=2),
        # Parts of unequal length, and more parts than there are steps.
        Tile(block_m=16, block_n=128, block_k=128, split_k=2),
        Tile(block_m=16, block_n=128, block_k=64, split_k=4),
        Tile(block_m=16, block_n=128, block_k=128, split_k=8),
    ],
    ids=lambda tile: "x".join(map(str, dataclasses.astuple(tile))),
)
def test_tiles(tile: Tile, scales: str) -> None:
    given = arguments((33, 200, 321), scales)
    assert_close(fp8_gemm(*given.all(), out_dtype=torch.float32, tile=tile), given)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("scales", ["channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_and_dtype_of_the_output(dtype: torch.dtype, scales: str, split_k: int) -> None:
    given = arguments((5, 70, 300), scales)
    # So large that adding it twice, or scaling it, would show.
    size = float(given.expected().abs().mean())
    bias = (torch.randn(70, generator=torch.Generator().manual_seed(1)) * size).to(dtype).to(DEVICE)
    tile = dataclasses.replace(SMALL, split_k=split_k)
    assert_close(fp8_gemm(*given.all(), bias_N=bias, out_dtype=dtype, tile=tile), given, bias)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("scales", ["channel", "block"])
def test_only_its_own_memory(scales: str, split_k: int) -> None:
    """Inputs and output lie in wider matrices full of NaN, which is neither read nor overwritten."""
    given = arguments((17, 100, 260), scales)

    def among_nan(matrix: torch.Tensor) -> torch.Tensor:
        wide = torch.full((matrix.shape[0] + 3, matrix.shape[1] + 12), 0x7F, dtype=torch.uint8, device=DEVICE)
        inner = wide.view(torch.float8_e4m3fn)[2:-1, : matrix.shape[1]]
        inner.view(torch.uint8).copy_(matrix.view(torch.uint8))
        return inner

    canvas = torch.full((21, 128), float("nan"), device=DEVICE)
    out = canvas[2:19, :100]
    triton_gemm(
        among_nan(given.x),
        among_nan(given.weight),
        given.x_scales,
        given.weight_scales,
        None,
        out,
        blockwise=scales == "block",
        tile=dataclasses.replace(SMALL, split_k=split_k),
    )
    assert_close(out, given)
    untouched = canvas.isnan()
    untouched[2:19, :100] = True
    assert untouched.all()


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
@pytest.mark.parametrize("K", [256, 250])
@pytest.mark.parametrize("scales", ["channel", "block"])
def test_rows_of_padding_read_nothing(scales: str, K: int) -> None:
    """A tile of 16 rows that reads the only row 16 times is slower than 16 rows are."""
    given = arguments((1, 64, K), scales)
    with reads_of(given.x) as x_reads, reads_of(given.x_scales.t()) as scale_reads:
        fp8_gemm(*given.all(), out_dtype=torch.float32, tile=SMALL)
    assert (x_reads == 1).all()
    # One step ahead, so the last group is loaded once more.
    assert scale_reads.sum() <= given.x_scales.numel() + 1


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_batch_invariant_rows_have_the_bits_they_have_alone(scales: str) -> None:
    """Alone, at other places and among other rows, in one tile of rows and in several."""
    given = exact_arguments((67, 40, 300), scales)
    y = fp8_gemm(*given.all(), out_dtype=torch.float32, batch_invariant=True)
    assert_close(y, given)
    for rows in (slice(0, 1), slice(66, 67), slice(30, 33), slice(3, 67)):
        part = fp8_gemm(*given.rows(rows).all(), out_dtype=torch.float32, batch_invariant=True)
        assert torch.equal(part, y[rows])


def test_batch_invariant_takes_no_other_tile(tmp_path: Path) -> None:
    """Neither the given tile, which splits K, nor one tuned for this M is taken."""
    given = arguments((2, 40, 1030), "block")
    other = dataclasses.replace(SMALL, split_k=4)
    y = fp8_gemm(*given.all(), out_dtype=torch.float32, batch_invariant=True, tile=other, tuned_folder=tmp_path)
    same = fp8_gemm(*given.all(), out_dtype=torch.float32, tile=BATCH_INVARIANT_TILE)
    assert torch.equal(y, same)


def test_the_tuned_tile_of_the_batch_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuned tile is taken on a device of that name; where nothing is tuned, a default."""
    h200 = Device(capability=90, num_sms=132, name="NVIDIA H200", cuda_version=(13, 0), has_scaled_mm=True)
    taken: list[Tile] = []
    monkeypatch.setattr(gpu, "device_of", lambda device: h200)
    monkeypatch.setattr(gpu, "triton_gemm", lambda *given, tile, **how: taken.append(tile))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    tuned = {M: dataclasses.replace(SMALL, num_stages=stages) for M, stages in ((1, 2), (64, 5))}
    write_tiles(tmp_path / file_name(40, 300, h200.name, blockwise=True), tuned)
    for M in (1, 60):
        fp8_gemm(*arguments((M, 40, 300), "block").all(), tuned_folder=tmp_path)
    fp8_gemm(*arguments((1, 40, 300), "channel").all(), tuned_folder=tmp_path)
    assert taken == [tuned[1], tuned[64], default_tile(1, 40, 300, 132)]


@pytest.mark.parametrize("group_m", [1, 2, 5, 64])
def test_order_of_tiles_changes_nothing(group_m: int) -> None:
    """Five tiles of rows and three of columns: some group sizes divide five, others do not."""
    given = exact_arguments((70, 40, 128), "block")
    tile = Tile(block_m=16, block_n=16, block_k=128, group_m=group_m)
    y = fp8_gemm(*given.all(), out_dtype=torch.float32, tile=tile)
    assert torch.equal(y, fp8_gemm(*given.all(), out_dtype=torch.float32, tile=SMALL))


def test_scales_of_groups_in_either_order() -> None:
    given = arguments((5, 40, 300), "block")
    row_major = dataclasses.replace(given, x_scales=given.x_scales.contiguous())
    assert row_major.x_scales.stride() != given.x_scales.stride()
    assert torch.equal(fp8_gemm(*row_major.all(), tile=SMALL), fp8_gemm(*given.all(), tile=SMALL))


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_what_is_not_finite_stays_in_its_row(scales: str) -> None:
    given = arguments((18, 40, 300), scales)
    x_scales = given.x_scales.clone()
    x_scales[16, -1] = float("nan")
    y = fp8_gemm(*dataclasses.replace(given, x_scales=x_scales).all(), out_dtype=torch.float32, tile=SMALL)
    assert y[16].isnan().all()
    others = dataclasses.replace(given, x=_without(given.x, 16), x_scales=_without(given.x_scales, 16))
    assert_close(_without(y, 16), others)


def _without(matrix: torch.Tensor, row: int) -> torch.Tensor:
    return torch.cat((matrix[:row], matrix[row + 1 :]))


def test_no_rows() -> None:
    given = arguments((3, 40, 300), "block").rows(slice(0, 0))
    assert fp8_gemm(*given.all()).shape == (0, 40)


@contextmanager
def counted_copies() -> Iterator[list[object]]:
    """Yields a list of the calls of copy_."""
    copies: list[object] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            if func.overloadpacket is torch.ops.aten.copy_:
                copies.append(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        yield copies


def by_scaled_mm(of: Arguments, device: str, *, out_dtype: torch.dtype, blockwise: bool) -> torch.Tensor:
    x, weight, x_scales, weight_scales = (tensor.to(device) for tensor in of.all())
    return scaled_mm(x, weight, x_scales, weight_scales, None, out_dtype, blockwise=blockwise)


@pytest.mark.parametrize("scales", ["tensor", "channel", "token-tensor", "tensor-channel"])
def test_scaled_mm_gets_its_scales_right(scales: str) -> None:
    """torch computes these layouts on a CPU, too, from 2.13 on. It adds in float32, in its own order."""
    given = arguments((8, 32, 64), scales)
    y = by_scaled_mm(given, DEVICE, out_dtype=torch.float32 if DEVICE == "cpu" else torch.bfloat16, blockwise=False)
    assert_close(y, given)


@pytest.mark.parametrize("scales", ["tensor", "channel"])
def test_scaled_mm_writes_into_out(scales: str) -> None:
    """Contiguous memory receives the result itself, without a copy; other memory receives a copy."""
    given, dtype = arguments((8, 32, 64), scales), torch.bfloat16 if DEVICE == "cuda" else torch.float32
    expected = by_scaled_mm(given, DEVICE, out_dtype=dtype, blockwise=False)
    wide = torch.full((8, 48), 7, dtype=dtype, device=DEVICE)
    for out in (torch.empty_like(expected), wide[:, :32]):
        with counted_copies() as copies:
            assert scaled_mm(*given.all(), None, dtype, blockwise=False, out=out) is out
        assert torch.equal(out, expected)
        assert len(copies) == (0 if out.is_contiguous() else 1)
    assert (wide[:, 32:] == 7).all()


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_scaled_mm_gets_blocks_in_the_layout_it_checks(groups: int) -> None:
    """On a CPU torch does not compute these layouts but still checks them."""
    given = arguments((8, 256, 128 * groups), "block")
    assert by_scaled_mm(given, "meta", out_dtype=torch.bfloat16, blockwise=True).shape == (8, 256)
    assert torch.equal(_block_scales(given.weight_scales)[:groups], given.weight_scales.t())
    as_quantized = quantize_blocks(given.weight.float())[1]
    assert _block_scales(as_quantized).data_ptr() == as_quantized.data_ptr(), "the scales are copied at each call"


def test_scaled_mm_would_refuse_another_layout() -> None:
    """Guards the test above: torch does check without a GPU."""
    given = arguments((8, 256, 384), "block")
    other = dataclasses.replace(given, x_scales=given.x_scales.contiguous())
    with pytest.raises(RuntimeError, match="1x128 x 128x128 blockwise scaling"):
        by_scaled_mm(other, "meta", out_dtype=torch.bfloat16, blockwise=True)


def test_choice_is_said_with_its_reason() -> None:
    given = arguments((3, 40, 300), "block")
    choice = fp8_gemm_choice(*given.all(), batch_invariant=True)
    assert (choice.path, choice.reason.split(":")[0]) == ("triton", "batch_invariant")
    if DEVICE == "cpu":
        assert fp8_gemm_choice(*given.all()).reason == "scaled_mm does not take it: there is no GPU"
        with pytest.raises(ValueError, match="path='scaled_mm': there is no GPU; path='triton' takes it"):
            fp8_gemm(*given.all(), path="scaled_mm")
    with pytest.raises(ValueError, match="batch_invariant needs one tile"):
        fp8_gemm(*given.all(), path="scaled_mm", batch_invariant=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(3, 300)}, r"x of shape \(3, 300\).*torch\.float32"),
        ({"weight": torch.zeros(300, 40, dtype=torch.float8_e4m3fn).t()}, r"weight .* strides \(1, 40\)"),
        ({"weight": torch.zeros(40, 256, dtype=torch.float8_e4m3fn)}, "x has rows of 300, weight of 256"),
        ({"x_scales": torch.ones(3, 2)}, r"x_scales of shape \(3, 2\).*\[3, 3\] with \[1, 3\]"),
        ({"x_scales": torch.ones(3, 1)}, r"\(3, 1\).*weight_scales of shape \(1, 3\)"),
        ({"weight_scales": torch.ones(1, 3).double()}, r"torch\.float64"),
    ],
)
def test_what_cannot_be_multiplied_is_said(change: dict[str, torch.Tensor], said: str) -> None:
    given = dataclasses.replace(arguments((3, 40, 300), "block"), **{name: t.to(DEVICE) for name, t in change.items()})
    with pytest.raises(ValueError, match=said):
        fp8_gemm(*given.all())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out_dtype": torch.float64}, r"out_dtype=torch\.float64 is not one of torch\.bfloat16"),
        ({"bias_N": torch.zeros(40)}, r"bias of shape \(40,\) and torch\.float32: has to be \[40\] of torch\.bfloat16"),
        ({"path": "cutlass"}, r"path='cutlass' is not one of auto, triton, scaled_mm"),
        ({"out": torch.zeros(3, 41)}, r"out of shape \(3, 41\).*float32: \[3, 40\] of torch\.bfloat16, contiguous"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fp8_gemm(*arguments((3, 40, 300), "block").all(), **options)  # pyright: ignore[reportArgumentType]
