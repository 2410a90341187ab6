"""The records of quantization kinds: types that name them, and bytes that weights really take."""

from typing import get_args

import pytest
import torch

from configs.options import Options
from configs.quantization import KINDS, Quantization, QuantizationName, QuantizationOption
from kernels.linear.weights import Fp8Weight, Int4Weight, Int8Weight
from worker.weights.quantization.kinds import quantized


def test_types_name_exactly_the_kinds() -> None:
    assert get_args(QuantizationName) == tuple(KINDS)
    assert get_args(Quantization) == ("none", *KINDS)
    assert get_args(QuantizationOption) == ("auto", "none", *KINDS)
    assert all(f"{name}" in str(Options.model_fields["quantization"].description) for name in KINDS)


@pytest.mark.parametrize("num_inputs", [32, 96, 100])
@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_those_of_a_weight(name: QuantizationName, num_inputs: int) -> None:
    kind, num_outputs = KINDS[name], 6
    weight = quantized(torch.randn(num_outputs, num_inputs), name)
    assert isinstance(weight, Int8Weight | Int4Weight | Fp8Weight)
    scales = [getattr(weight, field) for field in ("scales_OG", "minima_OG", "scales") if hasattr(weight, field)]
    num_bytes = kind.bits * weight.values_OI.numel() // 8 + sum(each.numel() * each.itemsize for each in scales)
    assert num_outputs * kind.row_bytes(num_inputs) == num_bytes
    # The share of a whole group, or of no scale.
    few = kind.group or 1 << 20
    assert kind.row_bytes(few) / few == pytest.approx(kind.param_bytes, rel=1e-4)
