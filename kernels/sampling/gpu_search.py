"""The search for the least key that a filter keeps: keys and masses are explained in kernels/sampling/gpu_weights.py.

That is the largest key with which those that are not less reach a goal: a number of tokens (top_k) or a mass (top_p).
Its bits are found from the top. Each step puts the keys that are still in question into bins, by their next bits; the
step after it sees from the bins which of them has the least key. So a search is several launches of programs that share
nothing but sums of integers, and has no sort.

Steps 0 to 6 search for top_k. Steps 7 to 12 search for top_p, whose goal hangs on what top_k keeps; they are passes 1
to 6, as the bins of step 0, which hold all tokens, serve both. (top_p is searched among all tokens: those that top_k
drops are less likely than any that the goal needs.)
"""

import triton.language as tl

from kernels.sampling.gpu_weights import mass_of, sum_of, weight_of_key
from kernels.tiles.jit import jit

NUM_PASSES = 7
NUM_STEPS = 2 * NUM_PASSES - 1
# The first pass has a bin for every two exponents, 22 in all; the others have 16, for 4 bits: more would cost
# instructions for each token, fewer would take more passes.
FIRST_BINS, BINS = 22, 16
_FIRST_SHIFT = tl.constexpr(24)
_BITS = tl.constexpr(4)
MAX_BINS = tl.constexpr(32)
# int64 numbers of a search before a step: see _store.
STATE_SIZE = tl.constexpr(8)

_LAST_TOP_K_STEP = tl.constexpr(NUM_PASSES - 1)
_LAST_STEP = tl.constexpr(NUM_STEPS - 1)


@jit
def bin_shift(STEP: tl.constexpr):
    """Bits of a key that a step leaves to those after it."""
    if STEP <= _LAST_TOP_K_STEP:
        shift: tl.constexpr = _FIRST_SHIFT - STEP * _BITS
    else:
        shift: tl.constexpr = _FIRST_SHIFT - (STEP - _LAST_TOP_K_STEP) * _BITS
    return shift


@jit
def enter_step(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p, writes, STEP: tl.constexpr):
    """Of the search at `at`, before STEP: the least key's bits so far, and whether they already say what is kept. One
    of the programs that enter writes this down for the next step. top_k: int64, above 0 if that is what STEP searches
    for."""
    zero = tl.full((), 0, tl.int64)
    low = tl.full((), 0, tl.int32)
    if STEP == 0:
        state = (low, zero, zero, top_k, zero, zero)
    elif STEP == _LAST_TOP_K_STEP + 1:
        if top_k > 0:
            _, _, _, _, total, _ = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_TOP_K_STEP)
        else:
            total = tl.sum(_bins(masses_PLB, at, num_scored, 0))
        wanted = top_p * total.to(tl.float64)
        goal = wanted.to(tl.int64)
        goal += (goal.to(tl.float64) < wanted).to(tl.int64)
        state = _narrow(low, zero, zero, goal, zero, zero, counts_PLB, masses_PLB, at, num_scored, 0, True)
    else:
        state = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, STEP - 1)
    place = states_PLX + (STEP * num_scored + at) * STATE_SIZE
    for i in tl.static_range(6):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(place + i, state[i].to(tl.int64), mask=writes)
    return state[0], state[5] > 0


@jit
def least_key(states_PLX, counts_PLB, masses_PLB, at, num_scored, top_k, top_p):
    """What both searches found, after all steps."""
    least = tl.full((), 0, tl.int32)
    if top_k > 0:
        low, _, _, _, _, _ = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_TOP_K_STEP)
        least = tl.maximum(least, low)
    if top_p < 1.0:
        low, _, _, _, _, _ = _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, _LAST_STEP)
        least = tl.maximum(least, low)
    return least


@jit
def _bins(bins_PLB, at, num_scored, STEP: tl.constexpr):
    return tl.load(bins_PLB + (STEP * num_scored + at) * MAX_BINS + tl.arange(0, MAX_BINS))


@jit
def _after(states_PLX, counts_PLB, masses_PLB, at, num_scored, STEP: tl.constexpr):
    """The state after STEP, from the one before it and its bins."""
    place = states_PLX + (STEP * num_scored + at) * STATE_SIZE
    low = tl.load(place).to(tl.int32)
    count_above = tl.load(place + 1)
    mass_above = tl.load(place + 2)
    goal = tl.load(place + 3)
    kept_mass = tl.load(place + 4)
    settled = tl.load(place + 5)
    return _narrow(
        low, count_above, mass_above, goal, kept_mass, settled,
        counts_PLB, masses_PLB, at, num_scored, STEP, STEP > _LAST_TOP_K_STEP,
    )  # fmt: skip


@jit
def _narrow(
    low,  # the least key's bits so far
    count_above,  # tokens, and their mass, in the bins above those in question
    mass_above,
    goal,  # of count or mass
    kept_mass,  # what top_k keeps, of several equals at the end as many as there is room for; known when settled
    settled,  # whether all keys from `low` on are kept, so that the bits that are missing do not matter
    counts_PLB,
    masses_PLB,
    at,
    num_scored,
    STEP: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    bins = tl.arange(0, MAX_BINS)
    counts = _bins(counts_PLB, at, num_scored, STEP)
    masses = _bins(masses_PLB, at, num_scored, STEP)
    if BY_MASS:
        reached = mass_above + tl.cumsum(masses, reverse=True) >= goal
    else:
        reached = count_above + tl.cumsum(counts, reverse=True) >= goal
    # If all together do not reach the goal, the lowest.
    chosen = tl.max(tl.where(reached, bins, 0))
    new_low = low + (chosen << bin_shift(STEP))
    new_count = count_above + sum_of(counts, bins > chosen)
    new_mass = mass_above + sum_of(masses, bins > chosen)
    count = sum_of(counts, bins == chosen)
    if BY_MASS:
        new_settled = count <= 1
        new_kept = kept_mass
    else:
        room = goal - new_count
        new_settled = count <= room
        # Unless the bin is kept whole, this is right after the last step only, when it holds one key.
        whole = sum_of(masses, bins == chosen)
        new_kept = new_mass + tl.where(new_settled, whole, room * mass_of(weight_of_key(new_low)))
    is_settled = settled > 0
    return (
        tl.where(is_settled, low, new_low),
        tl.where(is_settled, count_above, new_count),
        tl.where(is_settled, mass_above, new_mass),
        goal,
        tl.where(is_settled, kept_mass, new_kept),
        tl.where(is_settled, settled, new_settled.to(tl.int64)),
    )
