"""Quantizing the weights of linear layers: bounds on how far any number may move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear.weights import (
    GROUP,
    Int4Weight,
    Int8Weight,
    Weight,
    concatenate,
    dequantize,
    map_rows,
    num_groups,
    quantize_int4,
    quantize_int8,
)

# Half of float16's spacing: relative, and the absolute minimum for subnormal numbers.
HALF_ROUNDS = (2.0**-11, 2.0**-25)
SMALLEST_NORMAL = 2.0**-126
WIDTHS = (1, 31, 32, 33, 64, 100)


@st.composite
def weights(draw: st.DrawFn, largest: float) -> torch.Tensor:
    """float32 [O, I]. Rows differ in magnitude and shape: spread out, nearly constant, zero but for one, or zero."""
    num_inputs = draw(st.sampled_from(WIDTHS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        size = min(largest, 10.0 ** draw(st.floats(-46, 39)))
        row = torch.rand(num_inputs, generator=generator) * 2 - 1
        shape = draw(st.sampled_from(("spread", "one side", "nearly constant", "constant", "one", "zero")))
        if shape == "one side":
            row = row.abs()
        elif shape == "nearly constant":
            row = 1 - row.abs() * 1e-4
        elif shape == "constant":
            row = torch.full((num_inputs,), -1.0)
        elif shape in ("one", "zero"):
            row = torch.zeros(num_inputs)
            row[draw(st.integers(0, num_inputs - 1))] = 1.0 if shape == "one" else 0.0
        rows.append(row * size)
    return torch.stack(rows)


@given(weights(largest=3e38))
@settings(max_examples=150, deadline=None)
def test_int8_moves_a_weight_by_half_a_step_of_its_row(weight: torch.Tensor) -> None:
    """A step is the row's largest over 127. Below the smallest normal float32, a step may round to zero."""
    quantized = quantize_int8(weight)
    assert (quantized.values_OI.dtype, quantized.values_OI.shape) == (torch.int8, weight.shape)
    assert (quantized.scales_OG.dtype, quantized.scales_OG.shape) == (torch.float32, (len(weight), 1))
    assert int(quantized.values_OI.min()) >= -127
    largest = weight.abs().amax(dim=1, keepdim=True).double()
    error = (dequantize(quantized).double() - weight.double()).abs()
    assert (error <= largest / 254 * (1 + 1e-5) + 127 * SMALLEST_NORMAL).all()
    is_normal = largest.squeeze(1) > 127 * SMALLEST_NORMAL
    kept = quantized.values_OI.abs().amax(dim=1)[is_normal]
    assert (kept == 127).all(), "a row's largest is not the largest that 8 bits hold"
    assert (error.gather(1, weight.abs().argmax(dim=1, keepdim=True)) <= largest * 1e-6 + 127 * SMALLEST_NORMAL).all()


@given(weights(largest=6e4))
@settings(max_examples=150, deadline=None)
def test_int4_moves_a_weight_by_half_a_step_of_its_group(weight: torch.Tensor) -> None:
    """A step is a fifteenth of the group's range; minimum and step are also rounded to float16."""
    quantized = quantize_int4(weight)
    groups = num_groups(weight.shape[1])
    assert (quantized.values_OI.dtype, quantized.values_OI.shape) == (torch.uint8, weight.shape)
    for each in (quantized.scales_OG, quantized.minima_OG):
        assert (each.dtype, each.shape) == (torch.float16, (len(weight), groups))
        assert each.isfinite().all()
    assert int(quantized.values_OI.max()) <= 15
    restored = dequantize(quantized).double()
    for start in range(0, weight.shape[1], GROUP):
        group = weight[:, start : start + GROUP].double()
        least, most = group.amin(dim=1, keepdim=True), group.amax(dim=1, keepdim=True)
        step = (most - least) / 15
        of_minimum = (least.abs() * HALF_ROUNDS[0]).clamp(min=HALF_ROUNDS[1])
        of_steps = 15 * ((step + of_minimum / 15) * HALF_ROUNDS[0]).clamp(min=HALF_ROUNDS[1])
        error = (restored[:, start : start + GROUP] - group).abs()
        assert (error <= step / 2 + of_minimum + of_steps).all()
        # The extremes are not rounded to a step; only the minimum and the scale are rounded.
        for extreme in (group.argmin(dim=1, keepdim=True), group.argmax(dim=1, keepdim=True)):
            assert (error.gather(1, extreme) <= 2 * of_minimum + of_steps).all()


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_zeros_stay_zeros_and_bf16_is_taken_as_it_is(quantize: type) -> None:
    assert torch.equal(dequantize(quantize(torch.zeros(3, 40))), torch.zeros(3, 40))
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(dequantize(quantize(weight)), dequantize(quantize(weight.float())))


@pytest.mark.parametrize("value", [1.0, -0.25, 65504.0, 2.0**-24])
def test_a_group_of_one_number_that_float16_has_is_exact_in_4_bits(value: float) -> None:
    weight = torch.full((2, 33), value)
    assert torch.equal(dequantize(quantize_int4(weight)), weight)


def test_subnormal_rows_do_not_wrap_around_in_8_bits() -> None:
    """For 190 times the smallest subnormal the step rounds from 1.5 to 1 of it: 190 steps, where at most 127 fit."""
    weight = torch.tensor([[190 * 2.0**-149, -(2.0**-149)]])
    restored = dequantize(quantize_int8(weight))
    assert (restored.sign() * weight.sign() >= 0).all()
    assert restored.abs().max() <= weight.abs().max() * 2


# --- parts of one layer


def _parts() -> dict[str, Weight]:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    values = torch.randint(-128, 128, (6, 40), dtype=torch.int8)
    return {
        "floats": weight,
        "int4": quantize_int4(weight),
        "rows": quantize_int8(weight),
        "groups": Int8Weight(values_OI=values, scales_OG=torch.rand(6, 2).half()),
    }


@pytest.mark.parametrize("kind", ["floats", "int4", "rows", "groups"])
def test_parts_of_one_kind_are_put_together_as_they_are(kind: str) -> None:
    part = _parts()[kind]
    whole = concatenate([part, map_rows(part, lambda rows: rows.flip(0))])
    assert type(whole) is type(part)
    assert torch.equal(dequantize(whole), torch.cat((dequantize(part), dequantize(part).flip(0))))


@pytest.mark.parametrize(
    "kinds", [("int4", "rows"), ("int4", "groups"), ("rows", "groups"), ("groups", "int4", "rows")]
)
def test_parts_of_different_kinds_become_8_bits(kinds: tuple[str, ...]) -> None:
    parts = [_parts()[kind] for kind in kinds]
    whole, exact = concatenate(parts), torch.cat([dequantize(part) for part in parts])
    assert isinstance(whole, Int8Weight)
    assert not whole.is_grouped
    assert ((dequantize(whole) - exact).abs() <= exact.abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)).all()


def test_one_part_is_not_copied() -> None:
    part = _parts()["int4"]
    assert isinstance(part, Int4Weight)
    assert concatenate([part]) is part
