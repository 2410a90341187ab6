"""What Triton kernels that turn heads share: the pairs of numbers that rope turns, in either order.

Legend: H heads of a tile, P pairs of a head, NUM_PAIRS padded to a power of two.
"""

import triton.language as tl

from kernels.tiles.jit import jit
from kernels.tiles.numbers import widen


@jit
def load_turns(cos_sin, row, row_stride, NUM_PAIRS: tl.constexpr, P: tl.constexpr):
    """float32 (cos, sin), [1, P] each, of a row of a table whose rows are NUM_PAIRS cosines, then as many sines."""
    pair = tl.arange(0, P)[None]
    ptrs = cos_sin + row * row_stride + pair
    mask = pair < NUM_PAIRS
    return widen(tl.load(ptrs, mask=mask, other=0.0)), widen(tl.load(ptrs + NUM_PAIRS, mask=mask, other=0.0))


@jit
def load_pairs(heads_H1, mask_H1, NUM_PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """float32 (first, second), [H, P] each; 0 where masked. heads_H1: pointers to the first number of each head.

    Interleaved pairs are (2i, 2i + 1), others (i, i + NUM_PAIRS). The two of a pair are one thread's, so that heads can
    be changed in place.
    """
    if INTERLEAVED:
        # Whole rows, then split: 16-byte vectors, where a tile of pairs is read two numbers at a time.
        number = tl.arange(0, 2 * P)[None]
        both = widen(tl.load(heads_H1 + number, mask=mask_H1 & (number < 2 * NUM_PAIRS), other=0.0))
        first, second = tl.split(tl.reshape(both, (both.shape[0], P, 2)))
    else:
        pair = tl.arange(0, P)[None]
        mask = mask_H1 & (pair < NUM_PAIRS)
        first = widen(tl.load(heads_H1 + pair, mask=mask, other=0.0))
        second = widen(tl.load(heads_H1 + NUM_PAIRS + pair, mask=mask, other=0.0))
    return first, second


@jit
def store_pairs(heads_H1, mask_H1, first, second, NUM_PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where load_pairs loads from; first and second are of the dtype that the heads have there."""
    if INTERLEAVED:
        number = tl.arange(0, 2 * P)[None]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * P))
        tl.store(heads_H1 + number, both, mask=mask_H1 & (number < 2 * NUM_PAIRS))
    else:
        pair = tl.arange(0, P)[None]
        mask = mask_H1 & (pair < NUM_PAIRS)
        tl.store(heads_H1 + pair, first, mask=mask)
        tl.store(heads_H1 + NUM_PAIRS + pair, second, mask=mask)
