"""From the largest number of a group to its scale, for every kernel that quantizes to e4m3.

Sizes are compared by their bits, which as integers have the order of the numbers, and in which infinity and NaN are
larger than all: so the maximum of a group also says whether all of it is finite, which no maximum of floats does on a
GPU.
"""

import triton.language as tl

from kernels.tiles.jit import jit
from kernels.tiles.numbers import E4M3_MAX, narrow

_INFINITY_BITS = tl.constexpr(0x7F800000)
# Scales are no smaller than this over 448: far below what activations and weights hold, and far enough from float32's
# smallest numbers for 1 / scale to be finite. A group of zeros gets it.
MIN_AMAX = tl.constexpr(1e-10)


@jit
def size_bits(x):
    """|x| of float32 as an int32 that compares as |x| does; infinity and NaN are above all finite ones."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@jit
def scale_of(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Scale of groups whose largest `size_bits` is amax_bits: amax / 448, or the power of two at or above it.

    NaN if anything in the group is not finite.
    """
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), MIN_AMAX)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    if POWER_OF_TWO:
        # One is carried into the exponent unless the mantissa is 0.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(amax_bits < _INFINITY_BITS, scale, float("nan"))


@jit
def quantized(x, scale, dtype: tl.constexpr):
    """e4m3 of float32 x / scale, saturated at +-448; NaN where x is not finite or the scale is NaN.

    scale: broadcasts against x. dtype: that of the output, as kernels.tiles.numbers.narrow has it.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    is_finite = size_bits(x) < _INFINITY_BITS
    return narrow(tl.where(is_finite, x * inverse, float("nan")), dtype)
