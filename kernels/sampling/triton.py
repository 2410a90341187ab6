"""Choosing tokens on a GPU, without reads by the host, so that it can be captured in a graph.

kernels/sampling/numpy_cpu.py has the definition. A token differs from the CPU's only where the uniform, or a filter's
cut, is within rounding of a step of the CDF: weights are float32 from the GPU's own exponential; sums are exact, in
integers, except that weights below 2^-43 of the largest count as 0. A row's token depends only on its own logits and
parameters, not on the shape of the launch.

L scored positions, R permanent rows, V vocabulary, C chunks of it, P steps of a search, B bins, X numbers of a state.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.sampling.triton_filters import (
    BINS,
    FIRST_BINS,
    MAX_BINS,
    NUM_STEPS,
    STATE_SIZE,
    _bin_kernel,
    _kept_mass_kernel,
    _maxima_kernel,
    load_chunk,
)
from kernels.sampling.triton_weights import (
    MAX_VOCABULARY,
    count_of,
    is_finite,
    key_of,
    mass_of,
    row_maximum,
    scale_of,
    sum_of,
    uniform_bits,
    weigh,
)
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit

# Tokens per program. A row of 128,256 is then 32 programs, which use the bandwidth of many SMs, and each of 128 threads
# holds 32 numbers in registers.
CHUNK = 4096
NUM_WARPS = 4

_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Sampling parameters of each permanent row: tensors [R] on the logits' device."""

    temperature_R: torch.Tensor  # float32; 0 is greedy
    top_k_R: torch.Tensor  # int32 or int64; off if 0, or at least the vocabulary's size
    top_p_R: torch.Tensor  # float64, in (0, 1]
    min_p_R: torch.Tensor  # float32, in [0, 1]
    seed_R: torch.Tensor  # uint64, or int64 with the same bits
    choice_R: torch.Tensor  # uint32, or int32 with the same bits


def sample(
    logits_LV: torch.Tensor,
    rows_L: torch.Tensor,
    positions_L: torch.Tensor,
    columns: SamplingColumns,
    tokens_L: torch.Tensor,
    *,
    draws: bool = True,
    filters: bool = True,
) -> None:
    """Writes each position's token to tokens_L (int32). With temperature 0 it is the likeliest, the lowest among
    equals; otherwise the one drawn by the uniform of (seed, choice, position). -1 if a logit is NaN or infinite, or
    none is finite.

    logits_LV: float32, bf16 or fp16, any row stride; -inf marks a token that cannot be drawn. rows_L: int32, the row
    whose parameters apply; negative is padding, for which nothing is read or written. positions_L: int32, index of the
    token in the row's output. draws: False if no row has a temperature above 0. filters: False if no row has top_k,
    top_p or min_p. A captured graph fixes both.

    Raises ValueError for a vocabulary of more than 2^19 tokens and for logits of another dtype.
    """
    num_scored, vocabulary = logits_LV.shape
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"logits of {vocabulary} tokens; masses are exact for up to {MAX_VOCABULARY}")
    if logits_LV.dtype not in _LOGITS_DTYPES:
        raise ValueError(f"logits of {logits_LV.dtype}; {', '.join(map(str, _LOGITS_DTYPES))} are supported")
    assert logits_LV.stride(1) == 1
    assert rows_L.shape == positions_L.shape == tokens_L.shape == (num_scored,)
    assert columns.top_p_R.dtype == torch.float64
    if not num_scored:
        return
    device = logits_LV.device
    num_chunks = cdiv(vocabulary, CHUNK)
    block_c = next_power_of_2(num_chunks)
    grid = (num_chunks, num_scored)
    stride = logits_LV.stride(0)
    maxima_LC = torch.empty(num_scored, num_chunks, dtype=torch.float32, device=device)
    tokens_LC = torch.empty(num_scored, num_chunks, dtype=torch.int32, device=device)
    _maxima_kernel[grid](logits_LV, rows_L, maxima_LC, tokens_LC, vocabulary, stride, CHUNK=CHUNK, num_warps=NUM_WARPS)
    least_keys_L, masses_LC = tokens_L, maxima_LC  # placeholders: greedy rows read neither
    if draws:
        least_keys_L = torch.empty(num_scored, dtype=torch.int32, device=device)
        masses_LC = torch.empty(num_scored, num_chunks, dtype=torch.int64, device=device)
        search = (None, None, None)
        shared = (columns.temperature_R, columns.top_k_R, columns.top_p_R)
        if filters:
            states_PLX = torch.empty(NUM_STEPS, num_scored, STATE_SIZE.value, dtype=torch.int64, device=device)
            bins_2PLB = torch.zeros(2, NUM_STEPS, num_scored, MAX_BINS.value, dtype=torch.int64, device=device)
            search = (states_PLX, *bins_2PLB)
            for step in range(NUM_STEPS):
                _bin_kernel[grid](
                    logits_LV,
                    rows_L,
                    *shared,
                    maxima_LC,
                    *search,
                    vocabulary,
                    stride,
                    num_scored,
                    step,
                    FIRST=step == 0,
                    NUM_BINS=BINS if step else FIRST_BINS,
                    CHUNK=CHUNK,
                    BLOCK_C=block_c,
                    num_warps=NUM_WARPS,
                )
        _kept_mass_kernel[grid](
            logits_LV,
            rows_L,
            *shared,
            columns.min_p_R,
            maxima_LC,
            *search,
            least_keys_L,
            masses_LC,
            vocabulary,
            stride,
            num_scored,
            FILTERS=filters,
            CHUNK=CHUNK,
            BLOCK_C=block_c,
            num_warps=NUM_WARPS,
        )
    _choose_kernel[(num_scored,)](
        logits_LV,
        rows_L,
        positions_L,
        columns.temperature_R,
        columns.seed_R,
        columns.choice_R,
        maxima_LC,
        tokens_LC,
        least_keys_L,
        masses_LC,
        tokens_L,
        vocabulary,
        stride,
        num_chunks,
        DRAWS=draws,
        CHUNK=CHUNK,
        BLOCK_C=block_c,
        num_warps=NUM_WARPS,
    )


def greedy(logits_LV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the likeliest token of each position, the lowest id among equals, and its logit: int32 [L], float32 [L].
    The logit is not finite, and the token undefined, if a logit of the position is NaN or infinite, or none is finite.

    logits_LV: float32, bf16 or fp16, any row stride.
    """
    num_scored, vocabulary = logits_LV.shape
    assert logits_LV.stride(1) == 1
    num_chunks = cdiv(vocabulary, CHUNK)
    rows_L = torch.zeros(num_scored, dtype=torch.int32, device=logits_LV.device)
    maxima_LC = torch.empty(num_scored, num_chunks, dtype=torch.float32, device=logits_LV.device)
    tokens_LC = torch.empty(num_scored, num_chunks, dtype=torch.int32, device=logits_LV.device)
    if num_scored:
        _maxima_kernel[(num_chunks, num_scored)](
            logits_LV, rows_L, maxima_LC, tokens_LC, vocabulary, logits_LV.stride(0), CHUNK=CHUNK, num_warps=NUM_WARPS
        )
    largest_L = maxima_LC.amax(1)
    tokens_L = torch.where(maxima_LC == largest_L[:, None], tokens_LC, vocabulary).amin(1)
    return tokens_L, largest_L


def uniforms(seeds_N: torch.Tensor, choices_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """The uniforms that `sample` draws with, bitwise those of worker.sampling.uniforms: float64 [N] in [0, 1),
    multiples of 2^-53.

    seeds_N: uint64, or int64 with the same bits. choices_N, positions_N: uint32, or int32 with the same bits.
    """
    count = len(seeds_N)
    uniforms_N = torch.empty(count, dtype=torch.float64, device=seeds_N.device)
    if count:
        _uniforms_kernel[(cdiv(count, 128),)](seeds_N, choices_N, positions_N, uniforms_N, count, BLOCK_N=128)
    return uniforms_N


@jit(do_not_specialize=["count"])
def _uniforms_kernel(seeds_N, choices_N, positions_N, uniforms_N, count, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < count
    seeds = tl.load(seeds_N + n, mask=there).to(tl.uint64)
    bits = uniform_bits(seeds, tl.load(choices_N + n, mask=there), tl.load(positions_N + n, mask=there))
    # Exact, since bits are below 2^53.
    tl.store(uniforms_N + n, bits.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)), mask=there)


@jit
def _choose_kernel(
    logits_LV,
    rows_L,
    positions_L,
    temperature_R,
    seed_R,
    choice_R,
    maxima_LC,
    tokens_LC,
    least_keys_L,
    masses_LC,
    tokens_L,
    vocabulary,
    stride,
    num_chunks,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows_L + at)
    if row < 0:
        return
    largest = row_maximum(maxima_LC, at, num_chunks, BLOCK_C)
    if not is_finite(largest):
        tl.store(tokens_L + at, -1)
        return
    chunks = tl.arange(0, BLOCK_C)
    there = chunks < num_chunks
    temperature = 0.0
    if DRAWS:
        temperature = tl.load(temperature_R + row)
    if temperature > 0:
        masses = tl.load(masses_LC + at * num_chunks + chunks, mask=there, other=0)
        bits = uniform_bits(tl.load(seed_R + row).to(tl.uint64), tl.load(choice_R + row), tl.load(positions_L + at))
        # uniform * total, rounded down: always below the total, so a token is always found.
        target = tl.umulhi(bits << 11, tl.sum(masses).to(tl.uint64)).to(tl.int64)
        chunk = count_of(tl.cumsum(masses) <= target)
        before = sum_of(masses, chunks < chunk)
        weights = weigh(load_chunk(logits_LV, at, stride, chunk, vocabulary, CHUNK), largest, scale_of(temperature))
        kept = tl.where(key_of(weights) >= tl.load(least_keys_L + at), mass_of(weights), 0)
        token = chunk * CHUNK + count_of(before + tl.cumsum(kept) <= target)
    else:
        maxima = tl.load(maxima_LC + at * num_chunks + chunks, mask=there, other=float("-inf"))
        firsts = tl.load(tokens_LC + at * num_chunks + chunks, mask=there, other=vocabulary)
        token = tl.min(tl.where(maxima == largest, firsts, vocabulary))
    tl.store(tokens_L + at, token)
