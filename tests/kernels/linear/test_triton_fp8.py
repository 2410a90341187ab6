"""Linear layers in e4m3: concatenating parts of their weights, and the layer on a GPU against unfused formulas."""

from typing import Any

import pytest
import torch

from kernels.backend import GpuBackend, gpu_backend
from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.silu_mul.reference import gelu_tanh_mul, silu_mul
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.gemm.fp8 import reference as gemm
from kernels.gemm.fp8.choose import Device
from kernels.gemm.fp8.dispatch import fp8_gemm
from kernels.gemm.quantize import reference as quantize
from kernels.linear import PackedLinear, Residual, triton_fp8
from kernels.linear.triton_fp8 import GpuFp8Linear
from kernels.linear.weights import Fp8Weight, concatenate, dequantize, in_blocks, map_rows, quantize_fp8
from tests.support.gpu.gpu import DEVICE

FP8 = torch.float8_e4m3fn
EPS = 1e-5
LAYOUTS = ("tensor", "channel", "block")


def _floats(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows and columns differ in magnitude, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    return weight * torch.logspace(0, 1, num_outputs)[:, None] * torch.logspace(0, -1, num_inputs) * (1 + seed)


def _weight(layout: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Fp8Weight:
    floats = _floats(num_outputs, num_inputs, seed)
    if layout == "tensor":
        values, scales = quantize.quantize_tensor(floats)
        return Fp8Weight(values_OI=values, scales=scales.reshape(1, 1))
    values, scales = (quantize.quantize_tokens if layout == "channel" else quantize.quantize_blocks)(floats)
    return Fp8Weight(values_OI=values, scales=scales)


# --- weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floats_are_the_values_times_their_scales(layout: str) -> None:
    weight = _weight(layout, 130, 257)
    assert torch.equal(
        dequantize(weight).double(), gemm.dequantized(weight.values_OI, weight.scales, 128).float().double()
    )
    assert weight.has_blocks is (layout == "block")


def test_quantizing_moves_a_weight_by_half_a_step_of_e4m3() -> None:
    """Half a step is 2^-4 of a normal number; the smallest numbers of a row are 2^-9 of its scale apart."""
    floats = _floats(5, 70)
    floats[3] = 0
    weight = quantize_fp8(floats)
    assert weight.scales.shape == (5, 1)
    assert (weight.values_OI.float().abs().amax(1)[[0, 1, 2, 4]] == 448).all()
    error = (dequantize(weight) - floats).abs()
    assert (error <= floats.abs() * 2.0**-4 * 1.001 + weight.scales * 2.0**-10).all()
    assert torch.equal(dequantize(quantize_fp8(floats.bfloat16())), dequantize(quantize_fp8(floats.bfloat16().float())))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(bad: float) -> None:
    floats = _floats(3, 40)
    floats[1, 7] = bad
    assert dequantize(quantize_fp8(floats)).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("layouts", "outputs", "num_inputs", "gives"),
    [
        (("tensor", "tensor", "tensor"), (160, 32, 32), 257, "channel"),
        (("tensor", "channel"), (96, 40), 130, "channel"),
        (("block", "block", "block"), (256, 128, 130), 257, "block"),
        (("tensor", "block"), (128, 256), 257, "block"),
        # If a row is one block wide, it has one scale.
        (("block", "channel"), (130, 40), 100, "channel"),
    ],
)
def test_parts_keep_their_own_scales(
    layouts: tuple[str, ...], outputs: tuple[int, ...], num_inputs: int, gives: str
) -> None:
    parts = [
        _weight(layout, size, num_inputs, i) for i, (layout, size) in enumerate(zip(layouts, outputs, strict=True))
    ]
    whole = concatenate(parts)
    assert isinstance(whole, Fp8Weight)
    assert whole.has_blocks is (gives == "block")
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))


@pytest.mark.parametrize(
    ("layouts", "outputs"),
    [(("block", "block", "block"), (256, 64, 64)), (("block", "channel"), (256, 128))],
    ids=["a part that ends within a block", "blocks beside channels"],
)
def test_parts_without_a_common_layout_are_quantized_anew_from_floats(
    layouts: tuple[str, ...], outputs: tuple[int, ...]
) -> None:
    parts = [_weight(layout, size, 257, i) for i, (layout, size) in enumerate(zip(layouts, outputs, strict=True))]
    whole = concatenate(parts)
    assert isinstance(whole, Fp8Weight)
    expected = quantize_fp8(torch.cat([dequantize(part) for part in parts]))
    assert torch.equal(dequantize(whole), dequantize(expected))


def test_a_part_that_was_left_in_floats_makes_floats_of_the_layer() -> None:
    fp8, floats = _weight("tensor", 40, 64), _floats(8, 64, 1).bfloat16()
    whole = concatenate([fp8, floats])
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.cat([dequantize(fp8), floats.float()]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_of_the_tensor_is_one_of_each_block(layout: str) -> None:
    weight = _weight(layout, 130, 257)
    blocks = in_blocks(weight)
    if layout == "channel":
        assert blocks is None
        return
    assert blocks is not None
    assert blocks.has_blocks
    assert torch.equal(dequantize(blocks), dequantize(weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_moved_with_their_scales(layout: str) -> None:
    weight = _weight(layout, 130, 140)
    assert torch.equal(dequantize(map_rows(weight, lambda rows: rows.flip(0))), dequantize(weight).flip(0))
    assert map_rows(weight, lambda rows: rows) is weight


# --- the layer on a GPU


def _linear(weight: Fp8Weight, norm: torch.Tensor | None = None, *, gated: bool = False, **options) -> GpuFp8Linear:
    bias, activation = options.pop("bias", None), options.pop("activation", "silu")
    gpu = GpuBackend(device=torch.device(DEVICE), **options)
    return GpuFp8Linear(weight, bias, norm, EPS, gated=gated, activation=activation, dtype=torch.float32, gpu=gpu)


def _expected(weight: Fp8Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The float64 result for inputs rounded as the layer rounds them."""
    rounded = (quantize.quantize_groups if weight.has_blocks else quantize.quantize_tokens)(x.float())
    return gemm.fp8_gemm(rounded[0], weight.values_OI, rounded[1], weight.scales, bias_N=bias)


def _assert_near(y: torch.Tensor, expected: torch.Tensor) -> None:
    """The bound allows for sums of 300 products in float32 (on a GPU with 14 bits, within 128 of them). It does not
    allow for an input rounded to the neighbouring number because the norm or gate differs in its last bit; no input
    here is."""
    bound = 2e-5 if DEVICE == "cpu" else 5e-3
    assert (y.double().cpu() - expected).abs().max() <= bound * expected.abs().max()


def _inputs(num_tokens: int, size: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, size, generator=generator) * torch.logspace(-1, 1, num_tokens)[:, None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_quantized_and_multiplied(layout: str) -> None:
    weight, x, bias = _weight(layout, 136, 300), _inputs(3, 300), _floats(1, 136)[0]
    out = torch.full((3, 136), torch.nan, device=DEVICE)
    y = _linear(weight, bias=bias)(x.to(DEVICE), out)
    assert y.data_ptr() == out.data_ptr()
    _assert_near(y, _expected(weight, x, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_pending", [False, True])
def test_the_norm_adds_what_is_pending_and_quantizes(layout: str, is_pending: bool) -> None:
    weight, x, delta, norm = _weight(layout, 40, 300), _inputs(3, 300), _inputs(3, 300, 6), _floats(1, 300)[0]
    residual = Residual(x.to(DEVICE).clone(), delta.to(DEVICE), is_pending=is_pending)
    stream = x + delta if is_pending else x
    _assert_near(_linear(weight, norm)(residual), _expected(weight, rms_norm(stream, norm, EPS)))
    assert not residual.is_pending
    assert torch.equal(residual.x_TE.cpu(), stream), "the addition is not kept"


@pytest.mark.parametrize(
    ("layout", "other", "activation"), [("tensor", "block", "gelu_tanh"), ("block", "channel", "silu")]
)
def test_a_gated_layer_quantizes_as_the_next_one_takes_it(layout: str, other: str, activation: Activation) -> None:
    """192 outputs end within a group of 128."""
    weight, last, x = _weight(layout, 384, 130), _weight(other, 130, 192, 1), _inputs(3, 130)
    norm = torch.ones(130)
    gated = (silu_mul if activation == "silu" else gelu_tanh_mul)(_expected(weight, rms_norm(x, norm, EPS)))
    residual = Residual(x.to(DEVICE).clone(), torch.full((3, 130), torch.nan, device=DEVICE))
    first, then = _linear(weight, norm, gated=True, activation=activation), _linear(last)
    assert (first.num_outputs, then.num_outputs) == (192, 130)
    _assert_near(first(residual), gated)
    then.add_to_(residual, first.gated_for(then, residual))
    assert residual.is_pending
    _assert_near(residual.delta_TE, _expected(last, gated))
    fused = residual.delta_TE.clone()
    residual.is_pending = False
    then.add_to_(residual, first(residual))
    assert torch.equal(residual.delta_TE, fused), "the fused kernel differs from its two parts"


@pytest.mark.parametrize("num_tokens", [64, 65])
def test_outputs_in_parts_of_a_block_are_padded_for_scaled_mm_alone(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU whose scaled_mm wants whole blocks of outputs. The result has the layer's outputs, in `out` if given."""
    weight, bias = _weight("block", 136, 256), _floats(1, 136)[0]
    h200 = Device(capability=90, num_sms=132, name="NVIDIA H200", cuda_version=(13, 0), has_scaled_mm=True)
    widths: list[int] = []

    def watched(*args: torch.Tensor, **how: Any) -> torch.Tensor:
        widths.append(len(args[1]))
        return fp8_gemm(*args, **how)

    monkeypatch.setattr(triton_fp8, "device_of", lambda device: h200)
    monkeypatch.setattr(triton_fp8, "fp8_gemm", watched)
    linear, x = _linear(weight, bias=bias), _inputs(num_tokens, 256)
    out = torch.full((num_tokens, 136), torch.nan, device=DEVICE)
    for y in (linear(x.to(DEVICE)), linear(x.to(DEVICE), out)):
        assert y.is_contiguous()
        _assert_near(y, _expected(weight, x, bias))
    assert y is out
    assert widths == [256 if num_tokens > 64 else 136] * 2
    assert linear.num_bytes == 256 * 256 + 2 * 2 * 4


@pytest.mark.parametrize("layout", ["channel", "block"])
def test_batch_invariant_rows_have_the_same_bits_alone(layout: str) -> None:
    weight, x = _weight(layout, 136, 300), _inputs(70, 300).to(DEVICE)
    linear = _linear(weight, batch_invariant=True)
    whole = linear(x)
    assert torch.equal(linear(x[66:67]), whole[66:67])


def test_a_packed_linear_takes_fp8_and_puts_one_after_the_other() -> None:
    """Between two FP8 layers no intermediate buffer is requested; before a float layer, one is."""
    path = gpu_backend(torch.float32, torch.device(DEVICE))
    norm, x = torch.ones(130), _inputs(2, 130)
    first, last = _weight("channel", 96, 130), _weight("channel", 130, 48, 1)
    gate_up = PackedLinear(first, None, path, norm_I=norm, eps=EPS, gated=True)
    taken: list[torch.Tensor] = []

    def between() -> torch.Tensor:
        taken.append(torch.empty(2, 48, device=DEVICE))
        return taken[-1]

    def result(down: PackedLinear) -> torch.Tensor:
        residual = Residual(x.to(DEVICE).clone(), torch.empty(2, 130, device=DEVICE))
        gate_up.add_through_(down, residual, between, into=residual)
        return residual.delta_TE

    assert gate_up.num_bytes == 96 * 130 + 96 * 4
    gated = silu_mul(_expected(first, rms_norm(x, norm, EPS)))
    _assert_near(result(PackedLinear(last, None, path)), _expected(last, gated))
    assert not taken
    _assert_near(result(PackedLinear(dequantize(last), None, path)), gated @ dequantize(last).double().T)
    assert len(taken) == 1


@pytest.mark.parametrize("groups", [1, 3, 4, 5])
def test_scales_of_blocks_lie_as_scaled_mm_asks(groups: int) -> None:
    weight = _weight("block", 300, 128 * groups)
    scales = _linear(weight)._scales
    assert torch.equal(scales.cpu(), weight.scales)
    assert scales.stride() == (-(-groups // 4) * 4, 1)
