"""Top-k, top-p and min-p on a GPU without a sort: a search by histograms for the least weight that is kept."""

import triton.language as tl

from kernels.sampling.triton_weights import (
    cannot_reach,
    count_of,
    is_finite,
    key_of,
    mass_of,
    row_maximum,
    scale_of,
    sum_of,
    weigh,
    weight_of_key,
)
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import widen

NUM_PASSES = 7
NUM_STEPS = 2 * NUM_PASSES - 1
# The first pass has one bin per two exponents, 22 in all; the others have 16, for 4 bits. More bins would cost
# instructions per token, fewer bins more passes.
FIRST_BINS, BINS = 22, 16
_FIRST_SHIFT = tl.constexpr(24)
_BITS = tl.constexpr(4)
MAX_BINS = tl.constexpr(32)
# int64 numbers of a search's state before a step: see enter_step.
STATE_SIZE = tl.constexpr(8)

_LAST_TOP_K_STEP = tl.constexpr(NUM_PASSES - 1)
_LAST_STEP = tl.constexpr(NUM_STEPS - 1)


@jit
def bin_shift(step):
    """The bits of a key that a step leaves to later steps. top_p's first step continues after step 0, which it shares
    with top_k's."""
    return _FIRST_SHIFT - tl.where(step > _LAST_TOP_K_STEP, step - _LAST_TOP_K_STEP, step) * _BITS


@jit
def enter_step(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p, writes, step, FIRST: tl.constexpr):
    """Returns the state of the search at `at` before a step: the least key's bits so far, and whether they already
    decide what is kept. The program with `writes` stores the state for the next step. top_k: int64, 0 if off; it is
    searched for before top_p. FIRST: the step is 0."""
    zero = tl.full((), 0, tl.int64)
    low = tl.full((), 0, tl.int32)
    if FIRST:
        state = (low, zero, zero, top_k, zero, zero)
    else:
        # Branches, not constants: Triton would compile a kernel for each.
        if step == _LAST_TOP_K_STEP + 1:
            if top_k > 0:
                _, _, _, _, total, _ = _after(
                    states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_TOP_K_STEP, False
                )
            else:
                total = tl.sum(_bins(masses_PLB, at, num_scored, 0))
            wanted = top_p * total.to(tl.float64)
            goal = wanted.to(tl.int64)
            goal += (goal.to(tl.float64) < wanted).to(tl.int64)
            low, count_above, mass_above, goal, kept_mass, settled = _narrow(
                low, zero, zero, goal, zero, zero, counts_PLB, masses_PLB, at, num_scored, 0, True
            )
        else:
            low, count_above, mass_above, goal, kept_mass, settled = _after(
                states_PLX, counts_PLB, masses_PLB, at, num_scored, step - 1, step > _LAST_TOP_K_STEP
            )
        state = (low, count_above, mass_above, goal, kept_mass, settled)
    place = states_PLX + (step * num_scored + at) * STATE_SIZE
    for i in tl.static_range(6):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(place + i, state[i].to(tl.int64), mask=writes)
    return state[0], state[5] > 0


@jit
def least_key(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p):
    """The least key that both searches have found, after all steps."""
    least = tl.full((), 0, tl.int32)
    if top_k > 0:
        low, _, _, _, _, _ = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_TOP_K_STEP, False)
        least = tl.maximum(least, low)
    if top_p < 1.0:
        low, _, _, _, _, _ = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_STEP, True)
        least = tl.maximum(least, low)
    return least


@jit
def _bins(bins_PLB, at, num_scored, step):
    return tl.load(bins_PLB + (step * num_scored + at) * MAX_BINS + tl.arange(0, MAX_BINS))


@jit
def _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, step, by_mass):
    """The state after a step, from the one before it and its bins."""
    place = states_PLX + (step * num_scored + at) * STATE_SIZE
    low = tl.load(place).to(tl.int32)
    count_above = tl.load(place + 1)
    mass_above = tl.load(place + 2)
    goal = tl.load(place + 3)
    kept_mass = tl.load(place + 4)
    settled = tl.load(place + 5)
    return _narrow(
        low,
        count_above,
        mass_above,
        goal,
        kept_mass,
        settled,
        counts_PLB,
        masses_PLB,
        at,
        num_scored,
        step,
        by_mass,
    )


@jit
def _narrow(
    low,  # the least key's bits so far
    count_above,  # tokens in the bins above the candidates, and their mass
    mass_above,
    goal,  # the count or mass to reach
    kept_mass,  # mass that top_k keeps, with only as many equals at the end as fit; known when settled
    settled,  # true if all keys from `low` on are kept, so that missing bits do not matter
    counts_PLB,
    masses_PLB,
    at,
    num_scored,
    step,
    by_mass,  # the goal is a mass, as of top_p, not a count
):
    bins = tl.arange(0, MAX_BINS)
    counts = _bins(counts_PLB, at, num_scored, step)
    masses = _bins(masses_PLB, at, num_scored, step)
    above = tl.where(by_mass, mass_above, count_above)
    reached = above + tl.cumsum(tl.where(by_mass, masses, counts), reverse=True) >= goal
    # The lowest bin if even all of them do not reach the goal.
    chosen = tl.max(tl.where(reached, bins, 0))
    new_low = low + (chosen << bin_shift(step))
    new_count = count_above + sum_of(counts, bins > chosen)
    new_mass = mass_above + sum_of(masses, bins > chosen)
    count = sum_of(counts, bins == chosen)
    room = tl.where(by_mass, 1, goal - new_count)
    new_settled = count <= room
    # If the bin is not kept whole, this is right only after the last step, when a bin holds a single key.
    whole = sum_of(masses, bins == chosen)
    top_k_mass = new_mass + tl.where(new_settled, whole, room * mass_of(weight_of_key(new_low)))
    new_kept = tl.where(by_mass, kept_mass, top_k_mass)
    is_settled = settled > 0
    return (
        tl.where(is_settled, low, new_low),
        tl.where(is_settled, count_above, new_count),
        tl.where(is_settled, mass_above, new_mass),
        goal,
        tl.where(is_settled, kept_mass, new_kept),
        tl.where(is_settled, settled, new_settled.to(tl.int64)),
    )


@jit
def load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK: tl.constexpr):
    """float32 logits of a chunk of one position; -inf beyond the vocabulary's end."""
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
    # Maxima ignore NaN on a GPU.
    has_nan = count_of(logits != logits) > 0
    largest = tl.max(tl.where(logits == logits, logits, float("-inf")))
    first = tl.min(tl.where(logits == largest, tokens, vocabulary))
    place = at * tl.num_programs(0) + chunk
    # An infinite maximum, as for NaN, marks a row that cannot be sampled.
    tl.store(maxima_LC + place, tl.where(has_nan, float("inf"), largest))
    tl.store(tokens_LC + place, first)


@jit(do_not_specialize=["num_scored", "step"])
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
    step,
    FIRST: tl.constexpr,
    NUM_BINS: tl.constexpr,
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
    if FIRST:
        # This step also fills top_p's first bins, with all tokens.
        wanted = (top_k > 0) | (top_p < 1.0)
    else:
        wanted = tl.where(step > _LAST_TOP_K_STEP, top_p < 1.0, top_k > 0)
    if (temperature <= 0) | (not wanted) | (not is_finite(largest)):
        return
    low, settled = enter_step(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p, chunk == 0, step, FIRST)
    scale = scale_of(temperature)
    if settled | cannot_reach(tl.load(maxima_LC + at * num_chunks + chunk), largest, scale, low):
        return
    weights = weigh(load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK), largest, scale)
    keys = key_of(weights)
    bins = tl.where(keys >= low, (keys - low) >> bin_shift(step), -1)
    masses = mass_of(weights)
    place = (step * num_scored + at) * MAX_BINS
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
    """A row's top_k, int64; 0 if off."""
    top_k = tl.load(top_k_R + row).to(tl.int64)
    return tl.where(top_k >= vocabulary, 0, top_k)
