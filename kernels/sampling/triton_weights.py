"""Uniforms and weights, shared by all passes of a draw on a GPU.

A weight is 2^((logit - largest) * log2(e) / temperature), float32, so the likeliest token weighs 1. Its mass is the
weight in units of 2^-43, rounded down to an integer: sums of masses are exact, whatever their order and the cuts of the
vocabulary, so atomics may add them. Its key is the weight's bits minus those of 2^-43: keys have the order of weights,
and are negative for weights without mass.
"""

import triton.language as tl

from kernels.triton_common.jit import jit

# 2^19 tokens of weight 1 have a mass of 2^62.
_MASS_OF_ONE = tl.constexpr(float(1 << 43))
MAX_VOCABULARY = 1 << 19
# float32's bits of 2^-43 and of 1: keys are from 0 to 0x15800000.
_KEY_OF_ZERO = tl.constexpr((127 - 43) << 23)
LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)

# More units in the last place than any exponential errs by: a chunk is skipped only if its likeliest token is further
# below.
_KEY_MARGIN = tl.constexpr(64)


@jit
def uniform_bits(seed, choice, position):
    """The uniform of worker.sampling.uniforms for (seed, choice, position), times 2^53, as uint64. seed: uint64. The
    others are below 2^32."""
    zero = (position * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), choice.to(tl.uint32), zero, zero)
    return ((first >> 5).to(tl.uint64) << 26) | (second >> 6).to(tl.uint64)


@jit
def row_maximum(maxima_LC, at, num_chunks, BLOCK_C: tl.constexpr):
    """The largest of the chunks' maxima of scored position `at`."""
    chunks = tl.arange(0, BLOCK_C)
    return tl.max(tl.load(maxima_LC + at * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")))


@jit
def count_of(which):
    """The number of true elements, int32."""
    return tl.sum(which.to(tl.int32))


@jit
def sum_of(values, which):
    return tl.sum(tl.where(which, values, 0))


@jit
def is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@jit
def scale_of(temperature):
    """The factor from differences of logits to exponents of 2. temperature: float32, above 0."""
    # A constant over a tensor is a constant to Triton 3.7's interpreter, of which there is no minimum.
    return tl.minimum(tl.full((), LOG2_E, tl.float32) / temperature, _LARGEST)


@jit
def weigh(logits, largest, scale):
    """Weights of float32 logits, none of which is larger than the finite `largest`."""
    return tl.exp2((logits - largest) * scale)


@jit
def key_of(weights):
    return weights.to(tl.int32, bitcast=True) - _KEY_OF_ZERO


@jit
def mass_of(weights):
    return (weights * _MASS_OF_ONE).to(tl.int64)


@jit
def weight_of_key(key):
    return (key + _KEY_OF_ZERO).to(tl.float32, bitcast=True)


@jit
def cannot_reach(chunk_maximum, largest, scale, least_key):
    """True if no key of a chunk reaches least_key."""
    return key_of(weigh(chunk_maximum, largest, scale)) + _KEY_MARGIN < least_key
