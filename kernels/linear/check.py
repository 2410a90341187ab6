"""Checks the C++ linears against the references, at load."""

import numpy as np
import torch

from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.silu_mul import Activation
from kernels.elementwise.silu_mul.reference import clamped_swiglu, gelu_tanh_mul, silu_mul
from kernels.linear.native import NativeLinear
from kernels.linear.reference import linear, quantized_linear
from kernels.linear.weights import Int4Weight, Int8Weight, num_groups
from kernels.native.check import compare, wrong
from kernels.native.library import NativeKernels

_EPS = 1e-5
# Outputs and inputs that fill no panel and no vector.
_SHAPE = 90, 70


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming dtype and error, if results differ."""
    generator = torch.Generator().manual_seed(0)
    # bfloat16 has 8 bits of mantissa: where inputs are rounded to it, errors of 2^-8 add up like a random walk.
    tolerance = 2e-2 if kernels.path.rounds_inputs else 1e-4
    weight_OI = torch.randn(_SHAPE, generator=generator) * _SHAPE[1] ** -0.5
    _check_floats(kernels, weight_OI, generator, 1e-4)
    _check_floats(kernels, weight_OI.bfloat16(), generator, tolerance)
    # Exponents so different that 12 bits a weight do not hold them.
    wide_OI = weight_OI * 2.0 ** -(torch.arange(_SHAPE[1]) % 35)
    _check_floats(kernels, wide_OI.bfloat16(), generator, tolerance)
    _check_quantized(kernels, generator)


def _check_floats(kernels: NativeKernels, weight: torch.Tensor, generator: torch.Generator, tolerance: float) -> None:
    dtype, num_gates, num_inputs = weight.dtype, weight.shape[0] // 2, weight.shape[1]
    # More rows than AMX multiplies at once.
    x = torch.randn(37, num_inputs, generator=generator)
    bias, norm = torch.randn(2 * num_gates, generator=generator), torch.randn(num_inputs, generator=generator)
    gate_up = linear(rms_norm(x, norm, _EPS), weight, bias)
    expected_of: dict[Activation, torch.Tensor] = {
        "silu": silu_mul(gate_up),
        "gelu_tanh": gelu_tanh_mul(gate_up),
        "clamped_swiglu": clamped_swiglu(gate_up),
    }
    for activation, expected in expected_of.items():
        got = NativeLinear(weight, bias, norm, _EPS, gated=True, activation=activation, kernels=kernels)(x)
        compare(kernels, f"linear of {dtype}, gated by {activation}", got, expected, tolerance)
    added = torch.randn(len(x), 2 * num_gates, generator=generator)
    expected = added + linear(x, weight, None)
    plain = NativeLinear(weight, None, None, 0.0, gated=False, kernels=kernels)
    plain.add_to_(added, x)
    compare(kernels, f"linear of {dtype}", added, expected, tolerance)
    ids, values = plain.argmax(x, None)
    largest = plain(x).max(dim=-1)
    compare(kernels, f"argmax of a linear of {dtype}", values, largest.values.double(), 1e-6)
    if not torch.equal(ids, largest.indices):
        raise wrong(kernels, f"argmax of a linear of {dtype} names another column")
    capped = NativeLinear(weight, None, None, 0.0, gated=False, soft_cap=2.0, kernels=kernels)
    compare(kernels, f"capped linear of {dtype}", capped(x), 2.0 * torch.tanh(linear(x, weight, None) / 2.0), tolerance)
    if not torch.equal(capped.argmax(x, None)[1], capped(x).amax(dim=-1)):
        raise wrong(kernels, f"argmax of a capped linear of {dtype} has another value")
    # Masks leave odd columns to even rows; the others have none.
    odd = np.arange(2 * num_gates) % 2 == 1
    mask_W = np.packbits(np.pad(odd, (0, -len(odd) % 32)), bitorder="little").view("<i4")
    ids, _ = plain.masked_argmax(x, [None if row % 2 else mask_W for row in range(len(x))])
    among_odd = plain(x).masked_fill(~torch.from_numpy(odd), -torch.inf).argmax(dim=-1)
    if not torch.equal(ids, torch.where(torch.arange(len(x)) % 2 == 1, largest.indices, among_odd)):
        raise wrong(kernels, f"argmax of a linear of {dtype} names a masked column")


def _check_quantized(kernels: NativeKernels, generator: torch.Generator) -> None:
    num_inputs, num_outputs = 70, 45
    shape, groups = (num_outputs, num_inputs), (num_outputs, num_groups(num_inputs))
    int8 = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    int4 = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    scales, minima = torch.rand(groups, generator=generator), torch.randn(groups, generator=generator)
    zeros = torch.randint(17, groups, generator=generator, dtype=torch.int8)
    weights: dict[str, Int8Weight | Int4Weight] = {
        "int8": Int8Weight(values_OI=int8, scales_OG=scales[:, :1].contiguous()),
        "grouped int8": Int8Weight(values_OI=int8, scales_OG=scales.half()),
        "int4": Int4Weight(values_OI=int4, scales_OG=scales.half(), minima_OG=minima.half()),
        "int4 with zeros": Int4Weight(values_OI=int4, scales_OG=scales.half(), minima_OG=zeros),
    }
    x = torch.randn(37, num_inputs, generator=generator)
    for name, weight in weights.items():
        packed = NativeLinear(weight, None, None, 0.0, gated=False, kernels=kernels)
        got = packed(x)
        compare(kernels, f"linear of {name}", got, quantized_linear(x, weight, None), 1e-5)
        # AMX multiplies many rows by tiles, and few as AVX-512 does.
        if not torch.equal(packed(x[:1]), got[:1]):
            raise wrong(kernels, f"linear of {name} gives a row alone other bits than among {len(x)}")
