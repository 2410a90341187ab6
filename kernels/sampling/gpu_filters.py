"""Programs that pass over the logits to find what filters keep: kernels/sampling/gpu_search.py says how.

L scored positions, R permanent rows, V vocabulary, C chunks of it, P steps, B bins, X numbers of a state.
"""

import triton.language as tl

from kernels.sampling.gpu_search import MAX_BINS, bin_shift, enter_step, least_key
from kernels.sampling.gpu_weights import (
    cannot_reach,
    count_of,
    is_finite,
    key_of,
    mass_of,
    row_maximum,
    scale_of,
    sum_of,
    weigh,
)
from kernels.tiles.jit import jit
from kernels.tiles.numbers import widen


@jit
def load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK: tl.constexpr):
    """float32 logits of a chunk of one position; -inf behind the vocabulary's end."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_LV + at.to(tl.int64) * stride + tokens, mask=tokens < vocabulary, other=float("-inf"))
    return widen(logits)


@jit
def _maxima_kernel(
    logits_LV,
    rows_L,
    maxima_LC,
    tokens_LC,
    vocabulary,
    stride,
    CHUNK: tl.constexpr,
):
    chunk, at = tl.program_id(0), tl.program_id(1)
    if tl.load(rows_L + at) < 0:
        return
    logits = load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    # Maxima leave NaN out on a GPU.
    has_nan = count_of(logits != logits) > 0
    largest = tl.max(tl.where(logits == logits, logits, float("-inf")))
    first = tl.min(tl.where(logits == largest, tokens, vocabulary))
    place = at * tl.num_programs(0) + chunk
    # A row with an infinite maximum cannot be sampled, as one with a NaN.
    tl.store(maxima_LC + place, tl.where(has_nan, float("inf"), largest))
    tl.store(tokens_LC + place, first)


@jit(do_not_specialize=["num_scored"])
def _bin_kernel(
    logits_LV,
    rows_L,
    temperature_R,
    top_k_R,
    top_p_R,
    maxima_LC,
    states_PLX,
    counts_PLB,
    masses_PLB,
    vocabulary,
    stride,
    num_scored,
    STEP: tl.constexpr,
    NUM_BINS: tl.constexpr,
    FOR_TOP_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk, at, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows_L + at)
    if row < 0:
        return
    temperature = tl.load(temperature_R + row)
    top_k = _top_k_of(top_k_R, row, vocabulary)
    top_p = tl.load(top_p_R + row)
    largest = row_maximum(maxima_LC, at, num_chunks, BLOCK_C)
    if FOR_TOP_P:
        wanted = top_p < 1.0
    else:
        # The first step also puts all tokens into top_p's bins.
        wanted = (top_k > 0) | ((STEP == 0) & (top_p < 1.0))
    if (temperature <= 0) | (not wanted) | (not is_finite(largest)):
        return
    low, settled = enter_step(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p, chunk == 0, STEP)
    scale = scale_of(temperature)
    if settled | cannot_reach(tl.load(maxima_LC + at * num_chunks + chunk), largest, scale, low):
        return
    weights = weigh(load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK), largest, scale)
    keys = key_of(weights)
    bins = tl.where(keys >= low, (keys - low) >> bin_shift(STEP), -1)
    masses = mass_of(weights)
    place = (STEP * num_scored + at) * MAX_BINS
    for i in tl.static_range(NUM_BINS):  # pyright: ignore[reportGeneralTypeIssues]
        count = count_of(bins == i)
        mass = sum_of(masses, bins == i)
        tl.atomic_add(counts_PLB + place + i, count.to(tl.int64), mask=count > 0, sem="relaxed")
        tl.atomic_add(masses_PLB + place + i, mass, mask=count > 0, sem="relaxed")


@jit(do_not_specialize=["num_scored"])
def _kept_mass_kernel(
    logits_LV,
    rows_L,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    maxima_LC,
    states_PLX,
    counts_PLB,
    masses_PLB,
    least_keys_L,
    masses_LC,
    vocabulary,
    stride,
    num_scored,
    FILTERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk, at, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows_L + at)
    if row < 0:
        return
    temperature = tl.load(temperature_R + row)
    largest = row_maximum(maxima_LC, at, num_chunks, BLOCK_C)
    if (temperature <= 0) | (not is_finite(largest)):
        return
    least = tl.full((), 0, tl.int32)
    if FILTERS:
        top_k, top_p = _top_k_of(top_k_R, row, vocabulary), tl.load(top_p_R + row)
        least = least_key(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p)
        least = tl.maximum(least, key_of(tl.load(min_p_R + row)))
    if chunk == 0:
        tl.store(least_keys_L + at, least)
    scale = scale_of(temperature)
    mass = tl.full((), 0, tl.int64)
    if not cannot_reach(tl.load(maxima_LC + at * num_chunks + chunk), largest, scale, least):
        weights = weigh(load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK), largest, scale)
        mass = sum_of(mass_of(weights), key_of(weights) >= least)
    tl.store(masses_LC + at * num_chunks + chunk, mass)


@jit
def _top_k_of(top_k_R, row, vocabulary):
    """int64; 0 is off."""
    top_k = tl.load(top_k_R + row).to(tl.int64)
    return tl.where(top_k >= vocabulary, 0, top_k)
